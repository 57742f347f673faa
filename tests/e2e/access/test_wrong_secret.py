"""A worker with another cluster secret: both sides say so, `slipstream status` shows why, the rest serves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.errors import Unavailable
from slipstream.operator_access import operator_dial
from supervisor.commands.status import show_status
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import LocalCluster
from tests.support.fixture_dirs import lasting_dir

WRONG = "prefill-1"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def misconfigured(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """One of two prefill workers has another secret."""
    with lasting_dir(request, "misconfigured") as run_dir:
        secret = run_dir / "other.secret"
        secret.write_text("the secret of another cluster")
        altered = {WRONG: {"arguments": ["--cluster-secret-file", str(secret)]}}
        (run_dir / "altered.json").write_text(json.dumps(altered))
        config = fake_engine_config(run_dir, prefill=2, decode=1, kvstores=0, drafters=0, routers=1)
        with LocalCluster(config) as running:
            yield running


def status_of(cluster: LocalCluster, capsys: pytest.CaptureFixture[str], *, as_json: bool) -> str:
    capsys.readouterr()
    with pytest.raises(Unavailable, match=f"no answer from {WRONG}$"):
        asyncio.run(show_status(cluster.run_dir, as_json=as_json, dial=operator_dial(cluster.run_dir)))
    return capsys.readouterr().out


def test_both_sides_warn_and_the_rest_serves(misconfigured: LocalCluster) -> None:
    named = f"{WRONG} at {misconfigured.workers[WRONG]} gets no requests"
    (warning, *more) = misconfigured.until_logged("router-0", named)
    assert "WARNING" in warning
    assert "--cluster-secret-file differs" in warning
    (refusal, *others) = misconfigured.until_logged(WRONG, "refuses peer router-0")
    assert "WARNING" in refusal and "--cluster-secret-file differs" in refusal
    # The router tries every two seconds; the logs have a line in thirty.
    assert len(more) <= 3 and len(others) <= 3
    assert misconfigured.client.chat(HELLO, max_tokens=4).usage is not None


def test_status_says_why_the_worker_is_not_reached(
    misconfigured: LocalCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    workers: list[dict[str, Any]] = json.loads(status_of(misconfigured, capsys, as_json=True))["workers"]
    rows = {worker["instance"]: worker for worker in workers}
    assert rows[WRONG]["status"] is None and "--cluster-secret-file differs" in rows[WRONG]["error"]
    assert rows["prefill-0"]["status"] is not None and rows["prefill-0"]["error"] is None
    text = status_of(misconfigured, capsys, as_json=False)
    (reason,) = [line for line in text.splitlines() if line.startswith(f"{WRONG}: ")]
    assert "it refuses this process" in reason and "--cluster-secret-file differs" in reason

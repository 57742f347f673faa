"""Decode workers with different context bounds, in real processes, one of them with a false record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from libs.common.cluster.worker_record import Role
from slipstream.client import Client
from slipstream.replies import Reply
from tests.support.clusters.fake_engines import fake_engine_config
from tests.support.clusters.local_cluster import REQUEST_S, LocalCluster
from tests.support.fixture_dirs import lasting_dir

# Answers at a time. One step makes a token of each, at hardly more than the cost of one.
AT_ONCE = 3
# Both leave room for a short prompt and OPEN_OUTPUT_TOKENS.
SMALL, LARGE = 1_150, 1_250


@pytest.fixture(scope="module", params=[SMALL, 1 << 40], ids=["honest", "false"])
def site(request: pytest.FixtureRequest) -> Iterator[tuple[LocalCluster, int]]:
    """decode-0 takes SMALL tokens and states the parameter; decode-1 takes LARGE."""
    with lasting_dir(request, "bounds") as run_dir:
        changes = {
            "decode-0": {"arguments": ["--max-context-tokens", str(SMALL)], "states": request.param},
            "decode-1": {"arguments": ["--max-context-tokens", str(LARGE)]},
        }
        (run_dir / "altered.json").write_text(json.dumps(changes))
        modules = dict.fromkeys(Role, "tests.support.clusters.altered_service")
        config = fake_engine_config(run_dir, pace_s=0.0, prefill=1, drafters=0, kvstores=0, modules=modules)
        with LocalCluster(config) as cluster:
            yield cluster, request.param


def test_answers_without_max_tokens_use_both_workers_and_end_at_the_bound_of_theirs(
    site: tuple[LocalCluster, int],
) -> None:
    cluster, _ = site
    ends: dict[str, set[int]] = {}
    with Client(cluster.routers[0], timeout_s=REQUEST_S) as client, ThreadPoolExecutor(AT_ONCE) as threads:

        def ask(number: int) -> Reply:
            messages = [{"role": "user", "content": f"Question {number}?"}]
            return client.chat(messages, ignore_eos=True, temperature=0.0)

        for first in range(0, 42, AT_ONCE):
            for reply in threads.map(ask, range(first, first + AT_ONCE)):
                assert reply.finish_reason == "length" and reply.usage is not None and reply.stats is not None
                total = reply.usage.prompt_tokens + reply.usage.completion_tokens
                ends.setdefault(reply.stats.decode_worker, set()).add(total)
            if len(ends) == 2:
                break
    assert ends == {"decode-0": {SMALL}, "decode-1": {LARGE}}
    cluster.assert_idle()

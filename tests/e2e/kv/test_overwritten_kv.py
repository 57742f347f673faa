"""A process without credentials overwrites all KV that it can reach. No text changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.kv.placed_chat import TEXT, ask_at, plain_config
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir
from tests.support.processes.kv_attacker import listening_ports

pytest.importorskip("mooncake.engine")

CASES = 5
WORKERS = ("prefill-0", "prefill-1")
KV_PROCESSES = (*WORKERS, "decode-0", "kvstore-0")
FAILURES = "slipstream_kv_checksum_failures_total"


def conversation(cluster: LocalCluster, case: int) -> list[str]:
    """The replies to three turns, each at the other prefill worker, which reads the earlier turns' KV."""
    messages = [{"role": "user", "content": f"Case {case}. {TEXT}"}]
    replies = []
    for turn in range(3):
        reply = ask_at(cluster, WORKERS[(case + turn) % 2], messages)
        replies.append(str(reply.as_message()))
        messages += [reply.as_message(), {"role": "user", "content": f"And {turn}? {TEXT[:400]}"}]
    return replies


@contextmanager
def attacked(cluster: LocalCluster) -> Iterator[Path]:
    """An attacker of all processes that hold KV, and the file with its counts."""
    pids = [str(cluster.pid(name)) for name in KV_PROCESSES]
    output = cluster.run_dir / "attacker.txt"
    with output.open("wb") as lines:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.processes.kv_attacker", *pids],
            stdin=subprocess.PIPE,
            stdout=lines,
            stderr=subprocess.DEVNULL,
        )
        try:
            yield output
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(timeout=30)
            finally:
                process.kill()
                process.wait(timeout=30)


@pytest.fixture(scope="module")
def undisturbed(request: pytest.FixtureRequest) -> Iterator[list[list[str]]]:
    """The replies of a cluster with the default transport, which no other process can write to."""
    with (
        lasting_dir(request, "undisturbed") as run_dir,
        LocalCluster(plain_config(run_dir, kvstores=1)) as cluster,
    ):
        for name in (*KV_PROCESSES, *cluster.router_names):
            ports = listening_ports(cluster.pid(name))
            assert ports and all(ports.values()), f"{name} listens beyond loopback: {ports}"
        yield [conversation(cluster, case) for case in range(CASES)]
        cluster.assert_idle()


def test_overwriting_all_registered_memory_changes_no_text(
    tmp_path: Path, undisturbed: list[list[str]]
) -> None:
    with LocalCluster(plain_config(tmp_path, kvstores=1, transport="mooncake")) as cluster:
        with attacked(cluster) as output:

            def counts() -> list[int]:
                whole = [line for line in output.read_text().splitlines() if line.endswith("}")]
                return list(json.loads(whole[-1]).values()) if whole else [0]

            until(lambda: all(counts()), what=lambda: f"writes into every process: {counts()}")
            got = [conversation(cluster, case) for case in range(CASES)]
            found = {name: cluster.status(name).counters.get(FAILURES, 0) for name in KV_PROCESSES}
        wrong = [case for case in range(CASES) if got[case] != undisturbed[case]]
        assert not wrong, f"cases {wrong} differ; {found} blocks were refused"
        assert any(found.values()), "no reader met the attacker"
        cluster.assert_idle()

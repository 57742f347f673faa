"""A process without credentials overwrites all memory of the pool. No text changes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from libs.common.cluster.worker_record import Role
from supervisor.configuration.plan import ClusterConfig
from tests.e2e.kv.placed_chat import TEXT
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.processes.kv_attack import attacked
from tests.support.processes.process_checks import mentioning

pytestmark = pytest.mark.skipif(find_spec("mooncake") is None, reason="Mooncake is missing")

NODES = ("kvstore-0", "kvstore-1")
CASES, TURNS = 6, 3
MAX_ROUNDS = 20
SEGMENT_BYTES = 32 << 20
# In bf16 a prompt that is computed in other pieces, after a refused block, may fall otherwise at a near tie.
_WORKER = ("--compute-dtype", "float32", "--kv-memory-bytes", str(4 << 20))
# When a conversation goes on, the others have taken its room everywhere but in the pool: they have 110 to 150
# blocks of 70 KiB, of which a worker holds 58 and a kvstore 24.
LITTLE_MEMORY = {
    Role.PREFILL: _WORKER,
    Role.DECODE: _WORKER,
    Role.KVSTORE: (
        *("--dram-bytes", str(2 << 20), "--disk-bytes", "0"),
        *("--pool-bytes", str(SEGMENT_BYTES), "--pool-replicas", "2"),
    ),
}


def pooled_config(run_dir: Path) -> ClusterConfig:
    """A prefill worker and two kvstores that pool their memory. Sockets carry all KV outside the pool."""
    return ClusterConfig(
        run_dir=run_dir,
        prefill=1,
        decode=1,
        kvstores=2,
        drafters=0,
        draft_model=None,
        pool="mooncake",
        extra_arguments=LITTLE_MEMORY,
    )


def counted(cluster: LocalCluster, name: str) -> float:
    """The sum of a counter over both nodes."""
    return sum(cluster.status(node).counters.get(f"slipstream_kvstore_{name}", 0.0) for node in NODES)


def conversations(cluster: LocalCluster) -> list[list[object]]:
    """The replies of each conversation. All have their first turn, then all their second, and so on."""
    said: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": f"Case {case}. {TEXT}"}] for case in range(CASES)
    ]
    replies: list[list[object]] = [[] for _ in said]
    for turn in range(TURNS):
        for messages, answers in zip(said, replies, strict=True):
            reply = cluster.client.chat(messages, temperature=0.0, max_tokens=24, ignore_eos=True)
            answers.append(reply.as_message())
            messages += [reply.as_message(), {"role": "user", "content": f"And {turn}? {TEXT[:400]}"}]
    return replies


def until_more(cluster: LocalCluster, name: str, expected: list[list[object]]) -> None:
    """Have the conversations again and again, each time with these replies, until the counter rises."""
    before = counted(cluster, name)
    for _ in range(MAX_ROUNDS):
        assert conversations(cluster) == expected
        if counted(cluster, name) > before:
            return
    raise AssertionError(f"{name} stays at {before:.0f}")


def agents_of(cluster: LocalCluster) -> list[int]:
    """The processes that contribute memory to the pool."""
    return [pid for node in NODES for pid in mentioning(f"--node-pid={cluster.pid(node)}\0")]


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_overwriting_the_memory_of_the_pool_changes_no_text(tmp_path: Path) -> None:
    with LocalCluster(pooled_config(tmp_path)) as cluster:
        until(lambda: not counted(cluster, "pool_unavailable"), what="both nodes in the pool")
        undisturbed = conversations(cluster)
        until_more(cluster, "hits_pool_total", undisturbed)
        agents = agents_of(cluster)
        with attacked(agents, tmp_path) as attack:

            def segments() -> list[int]:
                """The bytes that were overwritten in the segment of each agent."""
                regions = [region for process in attack.regions() for region in process]
                return [written for size, written in regions if size == SEGMENT_BYTES]

            until(
                lambda: segments() == [SEGMENT_BYTES] * len(NODES),
                what=lambda: f"writes into both segments: {attack.regions()}",
            )
            # The first time they meet values that were put before the attack, the second time others.
            for _ in range(2):
                until_more(cluster, "pool_corrupt_blocks_total", undisturbed)
            assert attack.regions()
        # The agents have removed what was damaged. What is put now stays whole.
        until_more(cluster, "hits_pool_total", undisturbed)
        assert agents_of(cluster) == agents
        cluster.assert_idle()

"""Two kvstore nodes that pool their memory: a conversation continues at the other node from the pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from libs.common.cluster.worker_record import Role
from tests.e2e.kv.placed_chat import TEXT, ask_at, plain_config
from tests.support.clusters.local_cluster import LocalCluster, until

NODES = ("kvstore-0", "kvstore-1")
OTHER_TEXT = (
    "My invoice has the wrong address on it, and the amount is wrong too. Could you send a new one? " * 24
)


def counter(cluster: LocalCluster, node: str, name: str) -> float:
    return float(cluster.status(node).counters[f"slipstream_kvstore_{name}"])


@pytest.mark.soak
def test_a_conversation_goes_on_from_the_pool_when_its_node_is_lost(tmp_path: Path) -> None:
    config = plain_config(
        tmp_path,
        kvstores=2,
        pool="mooncake",
        extra_arguments={Role.KVSTORE: ["--pool-replicas", "2"]},
        ready_timeout_s=115,
    )

    def ask(messages: list[dict[str, Any]], worker: str) -> Any:
        return ask_at(cluster, worker, messages, session="parcel")

    with LocalCluster(config) as cluster:
        until(
            lambda: not any(counter(cluster, node, "pool_unavailable") for node in NODES),
            timeout_s=60,
            what="both nodes in the pool",
        )
        first: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]
        answer = ask(first, "prefill-0")
        home = answer.stats.kvstore
        (other,) = (node for node in NODES if node != home)
        until(lambda: counter(cluster, home, "blocks_dram") > 2, what="blocks in a store")
        until(
            lambda: counter(cluster, home, "blocks_pool") == counter(cluster, home, "blocks_dram"),
            what="blocks in the pool",
        )
        cluster.assert_idle()
        # Only the pool has the conversation's blocks now.
        for instance in ("prefill-0", "decode-0"):
            cluster.call(cluster.supervisor.hold(instance))
            cluster.call(cluster.supervisor.release(instance), timeout_s=110)
        cluster.call(cluster.supervisor.hold(home))
        elsewhere = [{"role": "user", "content": OTHER_TEXT}]
        until(
            lambda: ask(elsewhere, "prefill-1").stats.kvstore == other, timeout_s=60, what="placement moved"
        )
        second = [*first, answer.as_message(), {"role": "user", "content": "And now?"}]
        went_on = ask(second, "prefill-1")
        assert went_on.stats.kvstore == other
        assert went_on.usage.cached_by_tier.get("pool", 0) > 0
        assert counter(cluster, other, "hits_pool_total") > 0
        cluster.call(cluster.supervisor.release(home), timeout_s=110)
        assert ask(second, "prefill-0").as_message() == went_on.as_message()
        cluster.assert_idle()

"""Two kvstore nodes: a conversation's blocks live on one of them, and losing it is a miss, not an error."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slipstream.supervisor.plan import ClusterConfig
from tests.support.local_cluster import LocalCluster, until

NODES = ("kvstore-0", "kvstore-1")
BLOCKS = "slipstream_kvstore_blocks_dram"
TEXT = "The parcel left the depot on Monday, and nobody has seen it since. Please look into it again. " * 24
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def two_stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    config = ClusterConfig(
        run_dir=tmp_path_factory.mktemp("stores"),
        kvstores=2,
        prefill=2,
        decode=1,
        drafters=0,
        draft_model=None,
        ready_timeout_s=115,
    )
    with LocalCluster(config) as running:
        yield running


def holder(cluster: LocalCluster, *, nodes: tuple[str, ...] = NODES) -> list[str]:
    return [node for node in nodes if cluster.status(node).counters[BLOCKS] > 0]


def ask(cluster: LocalCluster, messages: list[dict[str, Any]], worker: str) -> Any:
    headers = {"x-slipstream-prefill": worker}
    return cluster.client.chat(messages, session="parcel", headers=headers, **GREEDY)


@pytest.mark.timeout(300)
def test_a_chain_stays_on_its_node_and_a_lost_node_is_a_miss(two_stores: LocalCluster) -> None:
    first: list[dict[str, Any]] = [{"role": "user", "content": TEXT}]
    answer = ask(two_stores, first, "prefill-0")
    until(lambda: holder(two_stores), what="blocks in a store")
    two_stores.assert_idle()
    (home,) = holder(two_stores)  # all of them in one
    assert answer.trail.kvstore == home
    second = [*first, answer.as_message(), {"role": "user", "content": "And now?"}]
    moved = ask(two_stores, second, "prefill-1")
    assert moved.trail.kvstore == home
    assert moved.usage.cached_by_tier.get("dram", 0) > 0
    two_stores.assert_idle()
    assert holder(two_stores) == [home]

    two_stores.call(two_stores.supervisor.hold(home))
    (other,) = (node for node in NODES if node != home)
    third = [*second, moved.as_message(), {"role": "user", "content": "Thank you."}]
    during = [ask(two_stores, third, worker).as_message() for worker in ("prefill-0", "prefill-1")]
    assert during[0] == during[1]
    # Sooner or later the conversation lives on the node that is left.
    until(
        lambda: ask(two_stores, third, "prefill-0").trail.kvstore == other,
        timeout_s=60,
        what="placement moved",
    )
    until(lambda: holder(two_stores, nodes=(other,)), timeout_s=30, what="blocks on the other node")
    two_stores.call(two_stores.supervisor.release(home), timeout_s=110)
    assert ask(two_stores, third, "prefill-1").as_message() == during[0]
    two_stores.assert_idle()

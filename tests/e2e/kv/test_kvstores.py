"""Two kvstore nodes: the blocks of a conversation are on one of them, and its loss is a cache miss."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.kv.placed_chat import TEXT, ask_at, plain_config
from tests.support.clusters.local_cluster import LocalCluster, until
from tests.support.fixture_dirs import lasting_dir

NODES = ("kvstore-0", "kvstore-1")
BLOCKS = "slipstream_kvstore_blocks_dram"


@pytest.fixture(scope="module")
def two_stores(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    with (
        lasting_dir(request, "stores") as run_dir,
        LocalCluster(plain_config(run_dir, kvstores=2)) as running,
    ):
        yield running


def holder(cluster: LocalCluster, *, nodes: tuple[str, ...] = NODES) -> list[str]:
    return [node for node in nodes if cluster.status(node).counters[BLOCKS] > 0]


def ask(cluster: LocalCluster, messages: list[dict[str, Any]], worker: str) -> Any:
    return ask_at(cluster, worker, messages, session="parcel")


def test_a_chain_stays_on_its_node_and_a_lost_node_is_a_miss(two_stores: LocalCluster) -> None:
    homes: set[str] = set()
    numbers = itertools.count()
    second: list[dict[str, Any]] = []
    moved: Any = None

    def went_on_from_the_store() -> bool:
        """Run a conversation on one worker, then on the other. A worker does not wait for a slow store, so
        the test tries several conversations."""
        nonlocal second, moved
        first: list[dict[str, Any]] = [{"role": "user", "content": f"Case {next(numbers)}. {TEXT}"}]
        answer = ask(two_stores, first, "prefill-0")
        two_stores.assert_idle()
        homes.add(answer.stats.kvstore)
        assert set(holder(two_stores)) <= homes  # one node has all blocks of a chain
        second = [*first, answer.as_message(), {"role": "user", "content": "And now?"}]
        moved = ask(two_stores, second, "prefill-1")
        assert moved.stats.kvstore == answer.stats.kvstore
        two_stores.assert_idle()
        return bool(moved.usage.cached_by_tier.get("dram", 0))

    until(went_on_from_the_store, what="a conversation continues from a store")
    home = moved.stats.kvstore
    assert home in holder(two_stores)

    two_stores.call(two_stores.supervisor.hold(home))
    (other,) = (node for node in NODES if node != home)
    third = [*second, moved.as_message(), {"role": "user", "content": "Thank you."}]
    during = [ask(two_stores, third, worker).as_message() for worker in ("prefill-0", "prefill-1")]
    assert during[0] == during[1]
    # Placement moves the conversation to the remaining node.
    until(lambda: ask(two_stores, third, "prefill-0").stats.kvstore == other, what="placement moved")

    def held_there() -> bool:
        ask(two_stores, third, "prefill-0")
        return bool(holder(two_stores, nodes=(other,)))

    until(held_there, what="blocks on the other node")
    two_stores.call(two_stores.supervisor.release(home))
    assert ask(two_stores, third, "prefill-1").as_message() == during[0]
    two_stores.assert_idle()

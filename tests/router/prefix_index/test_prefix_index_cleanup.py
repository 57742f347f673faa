"""A dropped holder of many blocks is removed in small steps, and no lookup finds it meanwhile."""

from __future__ import annotations

from random import Random

import pytest

from libs.common.block_hash import chain_hashes
from services.router.prefix_index.block_node import BlockNode
from services.router.prefix_index.index import PrefixIndex
from slipstream.v1 import common_pb2

WORKER = common_pb2.CACHE_TIER_WORKER
N = 500


def prompt(number: int) -> list[bytes]:
    """Return the hashes of two blocks that no other prompt has."""
    return chain_hashes([number] * 32, root=b"r" * 16, salt=b"", block_tokens=16)


def test_a_holder_of_many_nodes_is_removed_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    index, removed = PrefixIndex(), 0
    set_confirmed, set_predicted = BlockNode.set_confirmed, BlockNode.set_predicted

    def confirmed(*arguments: object) -> None:
        nonlocal removed
        removed += 1
        set_confirmed(*arguments)  # type: ignore[arg-type]

    def predicted(*arguments: object) -> None:
        nonlocal removed
        removed += 1
        set_predicted(*arguments)  # type: ignore[arg-type]

    for number in range(N):
        index.predict("a", prompt(number), tenant="t", now_s=0.0, ttl_s=50.0)
        index.view("a").stored(WORKER, prompt(number))
        if number % 2:
            index.view("b").stored(WORKER, prompt(number)[:1])
    assert index.nodes == N
    monkeypatch.setattr(BlockNode, "set_confirmed", confirmed)
    monkeypatch.setattr(BlockNode, "set_predicted", predicted)
    index.drop("a")
    assert removed == 0
    assert [index.prefix_blocks("a", prompt(number), now_s=0.0) for number in (0, 1)] == [0, 0]
    # The holder returns before its removal is complete: its former blocks do not count.
    index.view("a").stored(WORKER, prompt(0))
    index.predict("c", prompt(N), tenant="t", now_s=0.0, ttl_s=50.0)
    most = 0
    while True:
        before = removed
        index.clean_up(0.0, max_blocks=80)
        index.check()
        most = max(most, removed - before)
        if removed == before:
            break
    assert most < 80
    assert index.blocks == 2 + N // 2 + 2
    assert [index.prefix_blocks("a", prompt(number), now_s=0.0) for number in (0, 1, 2)] == [2, 0, 0]
    assert index.prefix_blocks("b", prompt(1), now_s=0.0) == 1


def test_simultaneous_expiries_are_checked_in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes removed or predicted again before their expiry leave no stale queue entries."""
    index, checked = PrefixIndex(), 0
    expire_predictions = BlockNode.expire_predictions

    def count_and_expire(node: BlockNode, now_s: float) -> None:
        nonlocal checked
        checked += 1
        expire_predictions(node, now_s)

    monkeypatch.setattr(BlockNode, "expire_predictions", count_and_expire)
    for number in range(N):
        index.predict("a", prompt(number), tenant="t", now_s=0.0, ttl_s=50.5)
    for number in range(N // 2):
        index.predict("b", prompt(number), tenant="t", now_s=0.0, ttl_s=20.0)
    index.drop("a")
    while index.clean_up(1.0, max_blocks=80):
        index.check()
    assert (checked, index.blocks) == (N, N)
    while index.clean_up(21.0, max_blocks=80):
        checked = 0
        index.clean_up(21.0, max_blocks=80)
        assert checked <= 80 // 8
        index.check()
    assert index.blocks == 0
    checked = 0
    assert not index.clean_up(60.0, max_blocks=80)
    assert checked == 0


def test_branches_below_a_branch_leave_the_chain_whole() -> None:
    def branch(number: int) -> list[bytes]:
        return chain_hashes([number] * 640, root=b"r" * 16, salt=b"", block_tokens=16)

    index, trunk = PrefixIndex(), branch(0)
    index.predict("a", trunk, tenant="t", now_s=0.0, ttl_s=50.0)
    for at in (10, 30, 20):
        index.predict("b", trunk[:at] + branch(at)[:2], tenant="t", now_s=0.0, ttl_s=5.0)
        index.check()
    assert (index.nodes, index.blocks) == (7, 46)
    while index.clean_up(6.0):
        index.check()
    index.check()
    assert (index.nodes, index.blocks, index.prefix_blocks("a", trunk, now_s=6.0)) == (1, 40, 40)


def test_remaining_blocks_of_detached_nodes_are_merged() -> None:
    """After unordered reports and many drops, memory is proportional to the remaining blocks."""
    index, random = PrefixIndex(), Random(7)
    prompts = [prompt(number) for number in range(10 * N)]
    reported = [block_hash for hashes in prompts for block_hash in hashes]
    random.shuffle(reported)
    for holder in ("a", "b"):
        index.view(holder).stored(WORKER, reported)
    before = index.n_bytes / index.blocks
    kept = set(random.sample(range(10 * N), N // 5))
    dropped = [
        block_hash for number, hashes in enumerate(prompts) if number not in kept for block_hash in hashes
    ]
    random.shuffle(dropped)
    for begin in range(0, len(dropped), 50):
        index.view("a").removed(WORKER, dropped[begin : begin + 50])
        index.view("b").removed(WORKER, dropped[begin : begin + 50])
    index.check()
    assert index.blocks == 2 * len(kept)
    assert index.n_bytes / index.blocks < 8 * before
    for number in range(0, 10 * N, 7):
        expected = 2 if number in kept else 0
        assert index.prefix_blocks("b", prompts[number], now_s=0.0, tenant="t") == expected
    index.view("a").removed(WORKER, reported)
    index.view("b").removed(WORKER, reported)
    assert (index.nodes, index.blocks, index.n_bytes) == (0, 0, 0)


def test_the_figures_are_metrics() -> None:
    index = PrefixIndex(max_tenant_bytes=8000)
    for number in range(20):
        index.predict("a", prompt(number), tenant="t", now_s=0.0, ttl_s=50.0)
    figures = index.gauges()
    assert figures["slipstream_prefix_index_bytes"] == index.n_bytes > 0
    evicted = figures["slipstream_prefix_index_evicted_blocks_total"]
    assert figures["slipstream_prefix_index_blocks"] + evicted == 40 and evicted

"""A holder that had very much and is gone costs a little at a time, and is not asked for from then on."""

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
    """Two blocks that no other prompt has."""
    return chain_hashes([number] * 32, root=b"r" * 16, salt=b"", block_tokens=16)


def test_a_holder_of_many_runs_is_cleared_away_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    index, cleared = PrefixIndex(), 0
    set_confirmed, set_predicted = BlockNode.set_confirmed, BlockNode.set_predicted

    def told(*arguments: object) -> None:
        nonlocal cleared
        cleared += 1
        set_confirmed(*arguments)  # type: ignore[arg-type]

    def sent(*arguments: object) -> None:
        nonlocal cleared
        cleared += 1
        set_predicted(*arguments)  # type: ignore[arg-type]

    for number in range(N):
        index.predict("a", prompt(number), tenant="t", now_s=0.0, ttl_s=50.0)
        index.view("a").stored(WORKER, prompt(number))
        if number % 2:
            index.view("b").stored(WORKER, prompt(number)[:1])
    assert index.nodes == N
    monkeypatch.setattr(BlockNode, "set_confirmed", told)
    monkeypatch.setattr(BlockNode, "set_predicted", sent)
    index.drop("a")
    assert cleared == 0
    assert [index.prefix_blocks("a", prompt(number), now_s=0.0) for number in (0, 1)] == [0, 0]
    # It is back before it is cleared away: what it had before says nothing of what it has.
    index.view("a").stored(WORKER, prompt(0))
    index.predict("c", prompt(N), tenant="t", now_s=0.0, ttl_s=50.0)
    most = 0
    while True:
        before = cleared
        index.clean_up(0.0, max_blocks=80)
        index.check()
        most = max(most, cleared - before)
        if cleared == before:
            break
    assert most < 80
    assert index.blocks == 2 + N // 2 + 2
    assert [index.prefix_blocks("a", prompt(number), now_s=0.0) for number in (0, 1, 2)] == [2, 0, 0]
    assert index.prefix_blocks("b", prompt(1), now_s=0.0) == 1


def test_what_is_over_at_once_is_looked_at_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what was cleared away, or told of, before its time: nothing is left to be looked at in vain."""
    index, looked = PrefixIndex(), 0
    expire_predictions = BlockNode.expire_predictions

    def forget(run: BlockNode, now_s: float) -> None:
        nonlocal looked
        looked += 1
        expire_predictions(run, now_s)

    monkeypatch.setattr(BlockNode, "expire_predictions", forget)
    for number in range(N):
        index.predict("a", prompt(number), tenant="t", now_s=0.0, ttl_s=50.5)
    for number in range(N // 2):
        index.predict("b", prompt(number), tenant="t", now_s=0.0, ttl_s=20.0)
    index.drop("a")
    while index.clean_up(1.0, max_blocks=80):
        index.check()
    assert (looked, index.blocks) == (N, N)
    while index.clean_up(21.0, max_blocks=80):
        looked = 0
        index.clean_up(21.0, max_blocks=80)
        assert looked <= 80 // 8
        index.check()
    assert index.blocks == 0
    looked = 0
    assert not index.clean_up(60.0, max_blocks=80)
    assert looked == 0


def test_what_is_left_of_loose_runs_lies_together() -> None:
    """A store told of blocks in no order and dropped most: what it has takes what it is worth."""
    index, random = PrefixIndex(), Random(7)
    prompts = [prompt(number) for number in range(10 * N)]
    told = [block_hash for hashes in prompts for block_hash in hashes]
    random.shuffle(told)
    for holder in ("a", "b"):
        index.view(holder).stored(WORKER, told)
    before = index.n_bytes / index.blocks
    kept = set(random.sample(range(10 * N), N // 5))
    gone = [
        block_hash for number, hashes in enumerate(prompts) if number not in kept for block_hash in hashes
    ]
    random.shuffle(gone)
    for begin in range(0, len(gone), 50):
        index.view("a").removed(WORKER, gone[begin : begin + 50])
        index.view("b").removed(WORKER, gone[begin : begin + 50])
    index.check()
    assert index.blocks == 2 * len(kept)
    assert index.n_bytes / index.blocks < 8 * before
    for number in range(0, 10 * N, 7):
        expected = 2 if number in kept else 0
        assert index.prefix_blocks("b", prompts[number], now_s=0.0, tenant="t") == expected
    index.view("a").removed(WORKER, told)
    index.view("b").removed(WORKER, told)
    assert (index.nodes, index.blocks, index.n_bytes) == (0, 0, 0)


def test_its_figures_are_metrics() -> None:
    index = PrefixIndex(max_tenant_bytes=8000)
    for number in range(20):
        index.predict("a", prompt(number), tenant="t", now_s=0.0, ttl_s=50.0)
    figures = index.gauges()
    assert figures["slipstream_prefix_index_bytes"] == index.n_bytes > 0
    evicted = figures["slipstream_prefix_index_evicted_blocks_total"]
    assert figures["slipstream_prefix_index_blocks"] + evicted == 40 and evicted

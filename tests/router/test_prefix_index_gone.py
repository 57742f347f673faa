"""A holder that had very much and is gone costs a little at a time, and is not asked for from then on."""

from __future__ import annotations

import pytest

from libs.common.block_hash import chain_hashes
from services.router.block_run import BlockRun
from services.router.prefix_index import PrefixIndex
from slipstream.v1 import common_pb2

WORKER = common_pb2.CACHE_TIER_WORKER
N = 500


def prompt(number: int) -> list[bytes]:
    """Two blocks that no other prompt has."""
    return chain_hashes([number] * 32, root=b"r" * 16, salt=b"", block_tokens=16)


def test_a_holder_of_many_runs_is_cleared_away_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    index, cleared = PrefixIndex(), 0
    set_told, set_sent = BlockRun.set_told, BlockRun.set_sent

    def told(*arguments: object) -> None:
        nonlocal cleared
        cleared += 1
        set_told(*arguments)  # type: ignore[arg-type]

    def sent(*arguments: object) -> None:
        nonlocal cleared
        cleared += 1
        set_sent(*arguments)  # type: ignore[arg-type]

    for number in range(N):
        index.predict("a", prompt(number), tenant="t", now_s=0.0, ttl_s=50.0)
        index.view("a").stored(WORKER, prompt(number))
        if number % 2:
            index.view("b").stored(WORKER, prompt(number)[:1])
    assert index.runs == N
    monkeypatch.setattr(BlockRun, "set_told", told)
    monkeypatch.setattr(BlockRun, "set_sent", sent)
    index.drop("a")
    assert cleared == 0
    assert [index.prefix_blocks("a", prompt(number), now_s=0.0) for number in (0, 1)] == [0, 0]
    # It is back before it is cleared away: what it had before says nothing of what it has.
    index.view("a").stored(WORKER, prompt(0))
    index.predict("c", prompt(N), tenant="t", now_s=0.0, ttl_s=50.0)
    most = 0
    while True:
        before = cleared
        index.tidy(0.0, most_blocks=80)
        index.check()
        most = max(most, cleared - before)
        if cleared == before:
            break
    assert most < 80
    assert index.blocks == 2 + N // 2 + 2
    assert [index.prefix_blocks("a", prompt(number), now_s=0.0) for number in (0, 1, 2)] == [2, 0, 0]
    assert index.prefix_blocks("b", prompt(1), now_s=0.0) == 1


def test_its_figures_are_metrics() -> None:
    index = PrefixIndex(max_tenant_bytes=8000)
    for number in range(20):
        index.predict("a", prompt(number), tenant="t", now_s=0.0, ttl_s=50.0)
    figures = index.gauges()
    assert figures["slipstream_prefix_index_bytes"] == index.n_bytes > 0
    forgotten = figures["slipstream_prefix_index_forgotten_blocks_total"]
    assert figures["slipstream_prefix_index_blocks"] + forgotten == 40 and forgotten

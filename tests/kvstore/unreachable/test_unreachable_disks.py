"""Blocks on disks without the one before them: found whatever took it, and dropped after a while."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from libs.common.telemetry.metric_tables.table import METRICS
from services.kvstore.core.metrics import tier_metrics
from services.kvstore.disk.table.evict import ChainLinks, Rows
from services.kvstore.pool.config import PoolOptions
from services.kvstore.pool.tier import PoolTier
from services.kvstore.unreachable.watch import GRACE_S
from tests.kvstore.disk.table_check import check_table
from tests.kvstore.disk.test_disk_faults import Rig, key, opened
from tests.kvstore.pool.memory_pool import MemoryPool

CHAIN = [key(number) for number in range(8)]


@pytest.fixture(params=[1, 2])
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async for rig in opened(request.param):
        yield rig


async def put_chain(rig: Rig) -> None:
    """All of it on the disks and nowhere else, known as one chain."""
    assert await rig.put(100) == 1  # there is a policy now
    rig.store.lookup_local(CHAIN)
    assert await rig.put(*range(8)) == 8
    rig.store.lookup_local(CHAIN)
    rig.drop_memory()
    assert rig.store.drop_unreachable() == 0


def sweep(rig: Rig, *, now_s: float) -> int:
    assert rig.store.disk_sweep is not None
    return rig.store.disk_sweep.sweep(now_s=now_s)


def figures(rig: Rig) -> tuple[float, float]:
    metrics = tier_metrics(rig.store)
    assert METRICS.keys() >= set(metrics)
    return (
        metrics["slipstream_kvstore_unreachable_blocks_nvme"],
        metrics["slipstream_kvstore_unreachable_dropped_nvme_total"],
    )


async def test_successors_of_a_dropped_block_are_dropped_after_the_grace_time(rig: Rig) -> None:
    await put_chain(rig)
    sweep(rig, now_s=0)
    assert await rig.set.drop(CHAIN[2])
    rig.store.lookup_local(CHAIN)
    assert sweep(rig, now_s=10) == 0 and figures(rig)[1] == 0
    assert figures(rig)[0] >= 1
    assert sweep(rig, now_s=10 + GRACE_S - 1) == 0
    for second in range(10):
        sweep(rig, now_s=10 + GRACE_S + second)
    assert [number for number in range(8) if rig.set.contains(key(number))] == [0, 1]
    assert figures(rig) == (0, 5)
    assert rig.set.contains(key(100))  # which begins a chain, as far as anybody knows
    for tier in rig.tiers:
        check_table(tier.table)


async def test_a_chain_that_is_whole_again_stays(rig: Rig) -> None:
    await put_chain(rig)
    sweep(rig, now_s=0)
    assert await rig.set.drop(CHAIN[2])
    rig.store.lookup_local(CHAIN)
    sweep(rig, now_s=10)
    assert await rig.put(2) == 1
    rig.drop_memory()
    for now_s in (20.0, 10 + 2 * GRACE_S, 10 + 4 * GRACE_S):
        assert sweep(rig, now_s=now_s) == 0
    assert figures(rig) == (0, 0)
    assert await rig.served(*range(8)) == list(range(8))


async def test_no_block_is_unreachable_while_its_start_is_in_memory_or_a_disk_is_unavailable(
    rig: Rig,
) -> None:
    await put_chain(rig)
    sweep(rig, now_s=0)
    rig.publish(2)
    assert rig.store.write_behind is not None and await rig.store.write_behind.flush(timeout_s=60)
    assert await rig.set.drop(CHAIN[2])
    rig.store.lookup_local(CHAIN)
    for now_s in (10.0, 10 + GRACE_S, 10 + 3 * GRACE_S):
        assert sweep(rig, now_s=now_s) == 0
    assert figures(rig) == (0, 0)
    rig.drop_memory()
    sweep(rig, now_s=1000)
    assert figures(rig)[0] >= 1
    rig.tiers[0].health.mark_unavailable(now_s=0)
    assert sweep(rig, now_s=1000 + GRACE_S) == 0
    assert figures(rig) == (0, 0)  # the disk may hold it; the grace time begins again
    rig.tiers[0].health.record_probe(succeeded=True, hanging=False, now_s=0)
    sweep(rig, now_s=1002 + GRACE_S)
    assert sweep(rig, now_s=1003 + 2 * GRACE_S) == 1
    assert not rig.set.contains(CHAIN[3])


async def test_ends_of_chains_are_dropped_after_their_segment_is_lost() -> None:
    """No lookup is necessary."""
    async for rig in opened(1):
        table = rig.tiers[0].table
        slots = table.slab_bytes // (3 * 4096)
        chain = [key(number) for number in range(slots + 8)]  # its end is in the second segment
        assert await rig.put(1000) == 1
        rig.store.lookup_local(chain)
        sweep(rig, now_s=0)
        for number in range(len(chain)):
            assert await rig.put(number) == 1
            rig.drop_memory()
        first = table.get(chain[0])
        last = table.get(chain[-1])
        assert first is not None and last is not None and first.slot.slab != last.slot.slab
        lost = table.retire(first.slot.slab)
        ends = [found for found in chain if rig.set.contains(found)]
        assert chain[0] in lost and 0 < len(ends) < 64
        sweep(rig, now_s=1)
        assert figures(rig)[0] >= 1
        for second in range(len(ends) + 1):
            sweep(rig, now_s=1 + GRACE_S + second)
        assert not any(rig.set.contains(found) for found in chain)
        assert figures(rig) == (0, len(ends))


async def test_a_block_that_memory_holds_too_stays_on_disk(rig: Rig) -> None:
    """The memory tier drops its own unreachable blocks."""
    await put_chain(rig)
    sweep(rig, now_s=0)
    assert await rig.set.drop(CHAIN[0])
    rig.store.lookup_local(CHAIN)
    rig.publish(1)
    sweep(rig, now_s=1)
    assert sweep(rig, now_s=1 + GRACE_S) == 0
    assert rig.set.contains(CHAIN[1])
    rig.drop_memory()
    assert sweep(rig, now_s=2 + GRACE_S) == 1
    assert not rig.set.contains(CHAIN[1])


async def test_no_block_is_unreachable_before_the_pool_was_listed(rig: Rig) -> None:
    """A chain's start may be there."""
    await put_chain(rig)
    options = PoolOptions("127.0.0.1:1", staging_bytes=1 << 20, admin=("127.0.0.1:2",))
    client: Any = MemoryPool(options)
    pool = rig.store.pool = PoolTier(rig.dram, options, client)
    sweep(rig, now_s=0)
    assert await rig.set.drop(CHAIN[2])
    rig.store.lookup_local(CHAIN)
    for now_s in (1.0, 2 + GRACE_S):  # it was not listed yet
        assert sweep(rig, now_s=now_s) == 0
    pool.inventory.add(CHAIN[2:3])
    pool.watch.has_listed = True
    sweep(rig, now_s=100)
    client.available = False
    client.listener.pool_changed()
    assert CHAIN[2] not in pool.inventory
    for now_s in (101.0, 102 + GRACE_S):
        assert sweep(rig, now_s=now_s) == 0
    assert figures(rig) == (0, 0)
    client.available = pool.watch.has_listed = True  # and it is not there
    sweep(rig, now_s=200)
    assert sweep(rig, now_s=200 + GRACE_S) >= 1
    assert not rig.set.contains(CHAIN[3])


async def test_many_blocks_are_dropped_with_one_scan_of_the_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which goes through all rows of a disk: of one of millions that is milliseconds each time."""
    asked: list[int] = []
    after = ChainLinks.after

    def counted(links: ChainLinks, rows: Rows) -> Rows:
        asked.append(len(rows))
        return after(links, rows)

    async for rig in opened(1):
        chains = [[key(10 * number), key(10 * number + 1), key(10 * number + 2)] for number in range(8)]
        assert await rig.put(1000) == 1
        for chain in chains:
            rig.store.lookup_local(chain)
        assert await rig.put(*(10 * number + at for number in range(8) for at in range(3))) == 24
        for chain in chains:
            rig.store.lookup_local(chain)
        rig.drop_memory()
        sweep(rig, now_s=0)
        for chain in chains:
            assert await rig.set.drop(chain[0])
        sweep(rig, now_s=1)
        monkeypatch.setattr(ChainLinks, "after", counted)
        assert sweep(rig, now_s=1 + GRACE_S) == 8
        assert asked == [8]
        assert sweep(rig, now_s=2 + GRACE_S) == 8
        assert not any(rig.set.contains(each) for chain in chains for each in chain)
        check_table(rig.tiers[0].table)

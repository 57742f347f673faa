"""The store with memory and disk: pins hold blocks, and concurrent pins share promotions."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from libs.common.checksum import checksum, checksum_at, memory_at
from libs.common.transport.base import PeerGone
from services.kvstore.disk.segment_format import Superblock
from services.kvstore.operations import Operations
from slipstream.errors import NotFound, Overloaded
from tests.kvstore.store_rig import BLOCK_BYTES, DRAM, NVME, Rig, key, keys, payload


async def test_a_put_block_is_held_found_and_pinned_with_its_bytes(rig: Rig) -> None:
    assert await rig.put([1, 2, 3]) == [1, 2, 3]
    assert rig.store.lookup_local(keys(1, 2, 3, 4)) == [DRAM] * 3
    assert rig.store.lookup_local(keys(9, 1)) == []
    pin = await rig.store.pin(keys(1, 2, 3, 4), owner="r", requested_ms=0)
    assert [each.tier for each in pin.blocks] == [DRAM] * 3
    for number, each in enumerate(pin.blocks, 1):
        address = rig.dram.address_of(each.block.slot)
        assert bytes(memory_at(address, each.block.n_bytes)) == payload(number)
        assert each.block.value == checksum(payload(number))
    assert pin.lease is not None
    assert rig.store.pinned_blocks == 3
    rig.store.release_pin(pin.lease.lease_id)
    rig.store.release_pin(pin.lease.lease_id)
    assert (
        rig.puts.reserve(keys(1, 2, 3), BLOCK_BYTES, owner="w") is None
    )  # a second put is refused without a transfer
    counts = rig.counters.snapshot()
    assert counts["slipstream_kvstore_hits_dram_total"] == 3
    assert counts["slipstream_kvstore_misses_total"] == 1


async def test_blocks_on_disk_are_promoted_and_reported_as_nvme(rig: Rig) -> None:
    await rig.to_disk_only([1, 2, 3])
    await rig.put([4])
    assert rig.store.lookup_local(keys(1, 2, 3, 4)) == [NVME] * 3 + [DRAM]
    pin = await rig.store.pin(keys(1, 2, 3, 4), owner="r", requested_ms=0)
    assert [each.tier for each in pin.blocks] == [NVME] * 3 + [DRAM]
    for number, each in enumerate(pin.blocks, 1):
        assert checksum_at(rig.dram.address_of(each.block.slot), BLOCK_BYTES) == checksum(payload(number))
    assert pin.lease is not None
    rig.store.release_pin(pin.lease.lease_id)
    assert rig.store.lookup_local(keys(1, 2, 3)) == [DRAM] * 3


async def test_many_pins_of_one_block_on_disk_read_it_once(rig: Rig) -> None:
    await rig.to_disk_only([1])
    reads = rig.io.reads
    pins = await asyncio.gather(*(rig.store.pin(keys(1), owner="r", requested_ms=0) for _ in range(20)))
    assert rig.io.reads == reads + 1
    block = pins[0].blocks[0].block
    assert block.holds == 20
    for pin in pins:
        assert pin.lease is not None
        rig.store.release_pin(pin.lease.lease_id)
    assert block.holds == 0


async def test_a_cancelled_pin_holds_nothing_and_the_promotion_continues(rig: Rig) -> None:
    await rig.put([3])
    await rig.to_disk_only([1, 2])
    rig.io.gate.clear()
    reads = rig.io.reads
    pins = [asyncio.create_task(rig.store.pin(keys(3, 1, 2), owner="r", requested_ms=0)) for _ in range(3)]
    async with asyncio.timeout(60):
        while rig.io.reads == reads:  # one call reads both neighbouring blocks
            await asyncio.sleep(0.001)
    for pin in pins[:2]:
        pin.cancel()
    await asyncio.gather(*pins[:2], return_exceptions=True)
    rig.io.gate.set()
    kept = await pins[2]
    assert len(kept.blocks) == 3
    assert [each.block.holds for each in kept.blocks] == [1, 1, 1]
    assert kept.lease is not None
    rig.store.release_pin(kept.lease.lease_id)


async def test_a_hanging_disk_is_a_miss_and_its_slot_is_freed_later(rig: Rig) -> None:
    await rig.to_disk_only([2])
    await rig.put([1])
    rig.io.gate.clear()
    pin = await rig.store.pin(keys(1, 2), owner="r", requested_ms=0, disk_wait_s=0.05)
    assert [each.tier for each in pin.blocks] == [DRAM]
    assert pin.lease is not None
    rig.store.release_pin(pin.lease.lease_id)
    rig.io.gate.set()
    deadline = asyncio.get_running_loop().time() + 60
    while rig.dram.get(key(2)) is None:  # the promotion continues for later pins
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)
    assert rig.dram.get(key(2)).holds == 0  # type: ignore[union-attr]


async def test_a_damaged_disk_block_ends_the_prefix(rig: Rig, tmp_path: Path) -> None:
    await rig.to_disk_only([1, 2, 3])
    entry = rig.disk.table.get(key(2))
    assert entry is not None
    with (tmp_path / "segment-000000").open("r+b") as file:
        slab_bytes, slot = rig.disk.table.slab_bytes, entry.slot
        file.seek(Superblock(0, slab_bytes, slot.slot_bytes).payload_offset(slot.index) + 77)
        file.write(bytes([payload(2)[77] ^ 1]))
    pin = await rig.store.pin(keys(1, 2, 3), owner="r", requested_ms=0)
    assert [each.block.key for each in pin.blocks] == keys(1)
    assert rig.disk.corrupt_blocks == 1
    assert rig.store.lookup_local(keys(1, 2, 3)) == [DRAM]
    assert pin.lease is not None
    rig.store.release_pin(pin.lease.lease_id)
    assert rig.dram.get(key(3)).holds == 0  # type: ignore[union-attr]  # promoted beyond the gap


async def test_eviction_keeps_pinned_blocks(rig: Rig) -> None:
    await rig.put([1, 2])
    pin = await rig.store.pin(keys(1, 2), owner="r", requested_ms=0)
    n_stored = 0
    for number in range(100, 140):
        rig.dram.table.touch(keys(number))  # a request wants a block before a worker stores it
        n_stored += len(await rig.put([number]))
    assert n_stored > 16  # more than the memory holds
    for number, each in enumerate(pin.blocks, 1):
        assert rig.dram.get(key(number)) is each.block
        assert checksum_at(rig.dram.address_of(each.block.slot), BLOCK_BYTES) == each.block.value
    assert pin.lease is not None
    rig.store.release_pin(pin.lease.lease_id)


async def test_puts_are_refused_and_promotions_miss_while_all_memory_is_pinned(rig: Rig) -> None:
    await rig.to_disk_only([50])
    await rig.put(list(range(16)))
    pin = await rig.store.pin(keys(*range(16)), owner="r", requested_ms=0)
    assert len(pin.blocks) == 16
    with pytest.raises(Overloaded):
        rig.puts.reserve(keys(60), BLOCK_BYTES, owner="w")
    none = await rig.store.pin(keys(50), owner="r", requested_ms=0)
    assert none.lease is None
    assert pin.lease is not None
    rig.store.release_pin(pin.lease.lease_id)
    assert await rig.put([60]) == [60]


async def test_a_pin_that_is_not_released_ends_with_its_lease(rig: Rig) -> None:
    await rig.put([1])
    pin = await rig.store.pin(keys(1), owner="r", requested_ms=500)
    assert pin.lease is not None
    rig.now_ms = 400
    rig.store.renew_pin(pin.lease.lease_id, requested_ms=500)
    rig.now_ms = 899
    assert rig.store.expire() == 0
    rig.now_ms = 900
    with pytest.raises(NotFound):
        rig.store.renew_pin(pin.lease.lease_id, requested_ms=500)
    assert rig.store.expire() == 1
    assert rig.at_rest()


async def test_random_use_leaks_no_block(rig: Rig) -> None:
    """Random concurrent puts, pins, cancels, failures and expiry; then the ledger is empty."""
    rng = random.Random(5)

    async def one(step: int) -> None:
        start = rng.randrange(40)
        chain = list(range(start, start + rng.randrange(1, 6)))
        try:
            if step % 2:
                async with asyncio.timeout(rng.choice([0.0005, 60])):
                    await rig.put(chain)
            else:
                async with asyncio.timeout(rng.choice([0.0005, 60])):
                    pin = await rig.store.pin(keys(*chain), owner="r", requested_ms=1000)
                for number, each in zip(chain, pin.blocks, strict=False):
                    address = rig.dram.address_of(each.block.slot)
                    assert bytes(memory_at(address, BLOCK_BYTES)) == payload(number)
                if pin.lease is not None and rng.random() < 0.8:
                    rig.store.release_pin(pin.lease.lease_id)
        except (TimeoutError, Overloaded):
            pass

    for _ in range(40):
        rig.transport.error = PeerGone("dead") if rng.random() < 0.1 else None
        await asyncio.gather(*(one(rng.randrange(1000)) for _ in range(6)))
        rig.now_ms += 300
        rig.store.expire()
        rig.puts.expire()
        rig.dram.table.check()
    rig.now_ms += 100_000
    rig.store.expire()
    rig.puts.expire()
    assert rig.store.write_behind is not None
    assert await rig.store.write_behind.flush(timeout_s=60)
    assert rig.at_rest()


async def test_queued_prefetches_are_bounded_over_all_callers(rig: Rig) -> None:
    """Of 16 blocks of memory, 4 may be loading and 4 may be queued."""
    await rig.to_disk_only(range(12))
    for start in range(0, 12, 4):
        rig.store.prefetch(keys(*range(start, start + 4)))
    async with asyncio.timeout(60):
        while rig.dram.table.n_blocks < 8:
            await asyncio.sleep(0.005)
    await rig.store.close(flush_timeout_s=60)
    assert rig.store.lookup_local(keys(*range(12)))[:9] == [DRAM] * 8 + [NVME]
    assert rig.at_rest()


async def test_a_drop_of_blocks_in_memory_lets_requests_run_in_between(rig: Rig) -> None:
    await rig.put(list(range(8)))
    dropping = asyncio.create_task(Operations(rig.store).drop(keys(*range(8))))
    seen = set()
    while not dropping.done():
        seen.add(rig.dram.table.n_blocks)
        await asyncio.sleep(0)
    assert len(seen) > 3

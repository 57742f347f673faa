"""Unexpected exceptions in promotions and writes: they cause misses and leak nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from services.kvstore.disk.queues.reads import OnRead, ReadResult
from services.kvstore.disk.table.policy import BlockOrigin
from tests.kvstore.disk.table_check import check_table
from tests.kvstore.store_rig import BLOCK_BYTES, Rig, key, keys


def broken_read_of(rig: Rig, number: int) -> Callable[..., Awaitable[list[ReadResult]]]:
    """Return a `read_many` that reads all blocks but this one and then raises."""
    read_many = rig.disk.read_many

    async def broken(wanted: Sequence[tuple[bytes, int]], *, on_read: OnRead) -> list[ReadResult]:
        others = [position for position, (wanted_key, _) in enumerate(wanted) if wanted_key != key(number)]
        results = await read_many(
            [wanted[at] for at in others], on_read=lambda at, result: on_read(others[at], result)
        )
        if len(others) < len(wanted):
            raise RuntimeError("an unexpected error")
        return results

    return broken


async def test_a_promotion_that_raises_is_a_miss_and_releases_the_other_holds(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.to_disk_only([2, 3])
    await rig.put([1])
    assert rig.store.write_behind is not None
    assert await rig.store.write_behind.flush(timeout_s=60)  # a write holds its block
    monkeypatch.setattr(rig.disk, "read_many", broken_read_of(rig, 2))
    pin = await rig.store.pin(keys(1, 2, 3), owner="r", requested_ms=0)
    assert [each.block.key for each in pin.blocks] == keys(1)
    assert pin.lease is not None
    rig.store.release_pin(pin.lease.lease_id)
    assert rig.at_rest()
    assert rig.dram.get(key(3)).holds == 0  # type: ignore[union-attr]
    # The slot of the broken promotion is free: all 16 slots can be allocated.
    assert await rig.put(list(range(100, 116))) == list(range(100, 116))


async def test_a_cancelled_pin_releases_its_holds_after_a_promotion_raised(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.to_disk_only([2, 3])
    await rig.put([1])
    assert rig.store.write_behind is not None
    assert await rig.store.write_behind.flush(timeout_s=60)  # a write holds its block
    monkeypatch.setattr(rig.disk, "read_many", broken_read_of(rig, 2))
    rig.io.gate.clear()
    pin = asyncio.create_task(rig.store.pin(keys(1, 2, 3), owner="r", requested_ms=0))
    reads = rig.io.reads
    async with asyncio.timeout(60):
        while rig.io.reads == reads:
            await asyncio.sleep(0.001)
    pin.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pin
    rig.io.gate.set()
    assert rig.dram.get(key(1)).holds == 0  # type: ignore[union-attr]
    async with asyncio.timeout(60):
        while rig.dram.get(key(3)) is None:
            await asyncio.sleep(0.001)


async def test_a_write_that_raises_stops_neither_the_writer_nor_the_close(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = rig.disk.write

    async def broken_write(
        wanted: bytes, address: int, n_bytes: int, digest: bytes, origin: BlockOrigin
    ) -> bool:
        if wanted != key(9):
            raise RuntimeError("an unexpected error")
        return await write(wanted, address, n_bytes, digest, origin)

    monkeypatch.setattr(rig.disk, "write", broken_write)
    await rig.put([1, 2, 3, 9])
    assert rig.store.write_behind is not None
    assert await rig.store.write_behind.flush(timeout_s=60)
    assert [rig.disk.contains(key(n)) for n in (1, 2, 3, 9)] == [False, False, False, True]
    async with asyncio.timeout(60):
        await rig.store.write_behind.close()


async def test_a_disk_write_that_raises_frees_its_slot(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("an unexpected error")

    monkeypatch.setattr(rig.disk.files, "_file_for", broken)
    assert not await rig.disk.write(key(1), rig.memory.address, BLOCK_BYTES, bytes(16))
    check_table(rig.disk.table)
    assert all(slab.taken == 0 for slab in rig.disk.table.slabs)

"""Drops that overtake running loads: a dropped block is not published again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.checksum import checksum, memory_at
from libs.common.telemetry.counters import Counters
from services.kvstore import operations
from services.kvstore.core.store import BlockStore, Pin
from services.kvstore.dram.tier import DramTier
from services.kvstore.loading import tombstones as drops
from services.kvstore.loading.tombstones import Tombstones
from services.kvstore.operations import Operations
from services.kvstore.pool.config import PoolOptions
from services.kvstore.pool.tier import PoolTier
from tests.kvstore.disk.test_disk_faults import Gate, key, opened, payload
from tests.kvstore.pool.memory_pool import MemoryPool

BLOCK_BYTES = 4000
KEYS = [key(number) for number in range(4)]


class SlowPool(MemoryPool):
    """A pool that delays the answers of one kind of call until `unblocked` is set."""

    def __init__(self, options: PoolOptions) -> None:
        super().__init__(options)
        self.slow = ""
        self.unblocked, self.done = asyncio.Event(), asyncio.Event()

    async def call(self, kind: str, **fields: Any) -> dict[str, Any]:
        answer = await super().call(kind, **fields)
        if kind == self.slow:
            self.done.set()
            await self.unblocked.wait()
        return answer


def pooled() -> tuple[BlockStore, SlowPool]:
    """Return a node whose blocks are only in the pool."""
    dram = DramTier(1 << 20)
    options = PoolOptions("127.0.0.1:1", staging_bytes=4 << 20)
    client = SlowPool(options)
    fake: Any = client
    return BlockStore(dram, None, Counters(), now_ms=lambda: 0.0, pool=PoolTier(dram, options, fake)), client


async def put(store: BlockStore) -> None:
    assert store.pool is not None
    for number, found in enumerate(KEYS):
        slot = store.dram.table.allocate(BLOCK_BYTES)
        assert slot is not None
        data = payload(number)[:BLOCK_BYTES]
        memory_at(store.dram.address_of(slot), BLOCK_BYTES)[:] = data
        store.dram.table.publish(found, slot, BLOCK_BYTES, checksum(data))
    store.pool.offer(KEYS)
    assert await store.pool.writes.flush(timeout_s=60)
    drop_from_memory(store)


def drop_from_memory(store: BlockStore) -> None:
    for found in store.dram.table.keys():  # noqa: SIM118
        block = store.dram.get(found)
        assert block is not None
        store.dram.table.drop(block)


async def pin(store: BlockStore) -> Pin:
    return await store.pin(KEYS, owner="r", requested_ms=0, disk_wait_s=60)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("slow", ["get", "find", "drop"])
async def test_a_pool_load_publishes_no_block_dropped_meanwhile(slow: str, every: bool) -> None:
    """The drop begins during the load, during the lookup before it, or while the pool still drops."""
    store, client = pooled()
    await put(store)
    dropped = KEYS if every else KEYS[1:2]
    client.slow = "clear" if slow == "drop" and every else slow
    operations = Operations(store)
    async with asyncio.timeout(60):
        if slow == "drop":
            values = dict(client.values)
            dropping = asyncio.create_task(operations.drop(None if every else dropped))
            await client.done.wait()
            client.values.update(values)  # as if the pool had not processed the drop yet
            pinned = await pin(store)
            for name in [each.hex() for each in dropped]:
                del client.values[name]
            client.unblocked.set()
            await dropping
        else:
            pinning = asyncio.create_task(pin(store))
            await client.done.wait()
            await operations.drop(None if every else dropped)
            client.unblocked.set()
            pinned = await pinning
    assert [each.block.key for each in pinned.blocks] == ([] if every else KEYS[:1])
    assert not any(store.contains(found) for found in dropped)
    if pinned.lease is not None:
        store.release_pin(pinned.lease.lease_id)
    client.slow = ""
    drop_from_memory(store)
    await put(store)  # later puts are kept
    pinned = await pin(store)
    assert len(pinned.blocks) == len(KEYS)
    assert pinned.lease is not None
    store.release_pin(pinned.lease.lease_id)
    await store.close(flush_timeout_s=1)


async def test_a_disk_load_publishes_no_block_dropped_meanwhile() -> None:
    async for rig in opened(1):
        assert await rig.put(*range(4)) == 4
        rig.drop_memory()
        gate = rig.disks[0].before = Gate("preadv")
        gate.open.clear()
        pinning = asyncio.create_task(pin(rig.store))
        async with asyncio.timeout(60):
            while not gate.waiting:
                await asyncio.sleep(0.01)
        dropping = asyncio.create_task(Operations(rig.store).drop(KEYS))
        async with asyncio.timeout(60):
            while any(rig.tiers[0].table.contains(found) for found in KEYS):
                await asyncio.sleep(0.01)
        gate.open.set()
        assert (await dropping).copies == 4
        assert (await pinning).blocks == []
        assert not any(rig.store.contains(found) for found in KEYS)


@pytest.mark.parametrize("put_again", [False, True])
async def test_a_slow_disk_write_keeps_no_block_dropped_meanwhile(
    put_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drop does not wait forever for the disk."""
    monkeypatch.setattr(operations, "FLUSH_S", 0.01)
    async for rig in opened(1):
        gate = rig.disks[0].before = Gate("pwritev")
        gate.open.clear()
        rig.publish(0)
        async with asyncio.timeout(60):
            while not gate.waiting:
                await asyncio.sleep(0.01)
        assert (await Operations(rig.store).drop(KEYS[:1])).copies == 1
        if put_again:
            rig.publish(0)
        gate.open.set()
        assert rig.store.write_behind is not None and await rig.store.write_behind.flush(timeout_s=60)
        assert rig.set.contains(KEYS[0]) is rig.store.contains(KEYS[0]) is put_again
        if not put_again:
            assert await rig.put(0) == 1  # later puts are kept


@given(
    steps=st.lists(st.tuples(st.booleans(), st.frozensets(st.sampled_from(KEYS)) | st.none()), max_size=12),
    at=st.integers(0, 12),
    most=st.integers(0, 5),
)
def test_tombstones_cover_every_drop_after_the_start_of_a_load_and_none_before(
    steps: list[tuple[bool, frozenset[bytes] | None]], at: int, most: int
) -> None:
    """Beyond the bound of remembered blocks, tombstones cover too many rather than too few."""
    before, drops.MAX_REMEMBERED_BLOCKS = drops.MAX_REMEMBERED_BLOCKS, most
    try:
        kept, begun, after = Tombstones(), 0, set[bytes]()
        for number, (fails, keys) in enumerate(steps):
            if number == at:
                begun, after = kept.epoch, set()
            try:
                with kept.dropping(None if keys is None else list(keys)):
                    assert all(
                        kept.covers(found, since_epoch=kept.epoch)
                        for found in (KEYS if keys is None else keys)
                    )
                    if fails:
                        raise OSError
            except OSError:
                pass
            after.update(KEYS if keys is None else keys)
        for found in KEYS:
            covers = kept.covers(found, since_epoch=begun)
            assert covers >= (found in after)
            assert not kept.covers(found, since_epoch=kept.epoch)
    finally:
        drops.MAX_REMEMBERED_BLOCKS = before


def test_more_tombstones_than_the_bound_cover_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.kvstore.loading.tombstones.MAX_REMEMBERED_BLOCKS", 3)
    kept = Tombstones()
    for name in (b"a", b"b", b"c"):
        with kept.dropping([name]):
            pass
    begun = kept.epoch
    assert kept.covers(b"c", since_epoch=0) and not kept.covers(b"other", since_epoch=0)
    with kept.dropping([b"d"]):
        pass
    assert kept.covers(b"other", since_epoch=begun)
    assert not kept.covers(b"other", since_epoch=kept.epoch)

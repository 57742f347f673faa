"""The store over both tiers: pins keep, promotions are shared, puts publish whole blocks or none."""

from __future__ import annotations

import asyncio
import ctypes
import random
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from libs.common.checksum import checksum, checksum_at, memory_at
from libs.common.errors import InvalidArgument, NotFound, Overloaded
from libs.common.registered_memory import PAGE_BYTES, PageAlignedMemory
from libs.common.telemetry import Counters
from libs.common.transport.base import PeerGone, ReadOp, Region, TransferTimeout
from services.kvstore.disk_format import Superblock
from services.kvstore.disk_io import SystemDiskIo
from services.kvstore.disk_set import DiskSet
from services.kvstore.disk_tier import DiskTier
from services.kvstore.dram_tier import DramTier
from services.kvstore.puts import Puts, Source
from services.kvstore.store import BlockStore
from slipstream.v1.common_pb2 import CacheTier

BLOCK_BYTES = 2 * PAGE_BYTES - 64
DRAM, NVME = CacheTier.CACHE_TIER_DRAM, CacheTier.CACHE_TIER_NVME


class CopyTransport:
    """A transport whose peers are this process: reads are copies. Fails as told."""

    kind = "socket"
    session_id = "here"
    reads_in_flight = 0

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.late: Region | None = None

    def register(self, buffer: object) -> Region:
        raise NotImplementedError

    async def read(self, session_id: str, reads: Sequence[ReadOp], *, timeout_s: float) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        for op in reads:
            ctypes.memmove(op.local_address, op.remote_address, op.n_bytes)

    def quarantined(self, address: int, n_bytes: int) -> bool:
        return self.late is not None and self.late.overlaps(address, n_bytes)

    async def close(self) -> None:
        return


class HangingIo(SystemDiskIo):
    """Reads wait while the gate is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.reads = 0

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.reads += 1
        self.gate.wait(30)
        return super().preadv(fd, buffers, offset)


class Rig:
    def __init__(self, directory: Path, *, dram_blocks: int = 16) -> None:
        self.now_ms = 0.0
        self.counters = Counters()
        self.transport = CopyTransport()
        self.io = HangingIo()
        self.dram = DramTier(dram_blocks * 2 * PAGE_BYTES)
        self.disk = DiskTier(directory, disk_bytes=8 << 20, io=self.io)
        self.disk.open()
        self.store = BlockStore(self.dram, DiskSet([self.disk]), self.counters, now_ms=lambda: self.now_ms)
        self.puts = Puts(self.store, self.transport, self.counters, now_ms=lambda: self.now_ms)
        self.memory = PageAlignedMemory(64 * BLOCK_BYTES)

    def sources(self, numbers: Sequence[int]) -> list[Source]:
        found = []
        for index, number in enumerate(numbers):
            address = self.memory.address + index * BLOCK_BYTES
            memory_at(address, BLOCK_BYTES)[:] = payload(number)
            found.append(Source(key(number), address, BLOCK_BYTES, checksum(payload(number))))
        return found

    async def put(self, numbers: Sequence[int]) -> list[int]:
        lease = self.puts.reserve([key(n) for n in numbers], BLOCK_BYTES, owner="w")
        if lease is None:
            return []
        committed, _ = await self.puts.commit(lease.lease_id, "s", self.sources(numbers), timeout_s=5)
        return [int.from_bytes(c, "little") for c in committed]

    async def to_disk_only(self, numbers: Sequence[int]) -> None:
        """Put blocks, let them be written, and drop them from memory."""
        assert self.store.write_behind is not None
        await self.put(numbers)
        assert await self.store.write_behind.flush(timeout_s=10)
        for number in numbers:
            block = self.dram.get(key(number))
            assert block is not None
            self.dram.table.drop(block)

    def at_rest(self) -> bool:
        """Nothing is held for anybody, and every slot is accounted for."""
        self.dram.table.check()
        held = self.store.pins + self.puts.reservations + self.puts.reserved_blocks
        return held == 0 and self.store.orphaned_blocks == 0


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    made.store.start()
    yield made
    made.io.gate.set()
    await made.store.close(flush_timeout_s=5)
    assert made.at_rest()
    assert made.dram.table.n_evictable == made.dram.table.n_blocks
    made.disk.close()


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)


async def test_a_put_block_is_held_found_and_pinned_with_its_bytes(rig: Rig) -> None:
    assert await rig.put([1, 2, 3]) == [1, 2, 3]
    assert rig.store.lookup(keys(1, 2, 3, 4)) == [DRAM] * 3
    assert rig.store.lookup(keys(9, 1)) == []
    pin = await rig.store.pin(keys(1, 2, 3, 4), owner="r", asked_ms=0)
    assert [each.tier for each in pin.blocks] == [DRAM] * 3
    for number, each in enumerate(pin.blocks, 1):
        address = rig.dram.address_of(each.block.slot)
        assert bytes(memory_at(address, each.block.n_bytes)) == payload(number)
        assert each.block.value == checksum(payload(number))
    assert pin.lease is not None
    assert rig.store.pinned_blocks == 3
    rig.store.release_pin(pin.lease.lease_id)
    rig.store.release_pin(pin.lease.lease_id)
    assert rig.puts.reserve(keys(1, 2, 3), BLOCK_BYTES, owner="w") is None  # a second put is free
    counts = rig.counters.snapshot()
    assert counts["slipstream_kvstore_hits_dram_total"] == 3
    assert counts["slipstream_kvstore_misses_total"] == 1


async def test_blocks_on_disk_are_promoted_and_say_so(rig: Rig) -> None:
    await rig.to_disk_only([1, 2, 3])
    await rig.put([4])
    assert rig.store.lookup(keys(1, 2, 3, 4)) == [NVME] * 3 + [DRAM]
    pin = await rig.store.pin(keys(1, 2, 3, 4), owner="r", asked_ms=0)
    assert [each.tier for each in pin.blocks] == [NVME] * 3 + [DRAM]
    for number, each in enumerate(pin.blocks, 1):
        assert checksum_at(rig.dram.address_of(each.block.slot), BLOCK_BYTES) == checksum(payload(number))
    assert pin.lease is not None
    rig.store.release_pin(pin.lease.lease_id)
    assert rig.store.lookup(keys(1, 2, 3)) == [DRAM] * 3


async def test_many_pins_of_one_block_on_disk_read_it_once(rig: Rig) -> None:
    await rig.to_disk_only([1])
    reads = rig.io.reads
    pins = await asyncio.gather(*(rig.store.pin(keys(1), owner="r", asked_ms=0) for _ in range(20)))
    assert rig.io.reads == reads + 1
    block = pins[0].blocks[0].block
    assert block.holds == 20
    for pin in pins:
        assert pin.lease is not None
        rig.store.release_pin(pin.lease.lease_id)
    assert block.holds == 0


async def test_a_cancelled_pin_holds_nothing_and_the_promotion_goes_on(rig: Rig) -> None:
    await rig.put([3])
    await rig.to_disk_only([1, 2])
    rig.io.gate.clear()
    reads = rig.io.reads
    pins = [asyncio.create_task(rig.store.pin(keys(3, 1, 2), owner="r", asked_ms=0)) for _ in range(3)]
    async with asyncio.timeout(10):
        while rig.io.reads == reads:  # both blocks are being read, as neighbours in one call
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


async def test_a_disk_that_hangs_is_a_miss_and_gives_its_slot_back_later(rig: Rig) -> None:
    await rig.to_disk_only([2])
    await rig.put([1])
    rig.io.gate.clear()
    pin = await rig.store.pin(keys(1, 2), owner="r", asked_ms=0, disk_wait_s=0.05)
    assert [each.tier for each in pin.blocks] == [DRAM]
    assert pin.lease is not None
    rig.store.release_pin(pin.lease.lease_id)
    rig.io.gate.set()
    deadline = asyncio.get_running_loop().time() + 10
    while rig.dram.get(key(2)) is None:  # it arrives for the next one
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)
    assert rig.dram.get(key(2)).holds == 0  # type: ignore[union-attr]


async def test_damage_on_disk_ends_the_prefix(rig: Rig, tmp_path: Path) -> None:
    await rig.to_disk_only([1, 2, 3])
    entry = rig.disk.table.get(key(2))
    assert entry is not None
    with (tmp_path / "segment-000000").open("r+b") as file:
        slab_bytes, slot = rig.disk.table.slab_bytes, entry.slot
        file.seek(Superblock(0, slab_bytes, slot.slot_bytes).payload_offset(slot.index) + 77)
        file.write(bytes([payload(2)[77] ^ 1]))
    pin = await rig.store.pin(keys(1, 2, 3), owner="r", asked_ms=0)
    assert [each.block.key for each in pin.blocks] == keys(1)
    assert rig.disk.corrupt_blocks == 1
    assert rig.store.lookup(keys(1, 2, 3)) == [DRAM]
    assert pin.lease is not None
    rig.store.release_pin(pin.lease.lease_id)
    assert rig.dram.get(key(3)).holds == 0  # type: ignore[union-attr]  # promoted beyond the gap


async def test_eviction_keeps_what_is_pinned(rig: Rig) -> None:
    await rig.put([1, 2])
    pin = await rig.store.pin(keys(1, 2), owner="r", asked_ms=0)
    for number in range(100, 140):
        assert await rig.put([number]) == [number]
    for number, each in enumerate(pin.blocks, 1):
        assert rig.dram.get(key(number)) is each.block
        assert checksum_at(rig.dram.address_of(each.block.slot), BLOCK_BYTES) == each.block.value
    assert pin.lease is not None
    rig.store.release_pin(pin.lease.lease_id)


async def test_when_all_memory_is_pinned_puts_are_refused_and_promotion_is_a_miss(rig: Rig) -> None:
    await rig.to_disk_only([50])
    await rig.put(list(range(16)))
    pin = await rig.store.pin(keys(*range(16)), owner="r", asked_ms=0)
    assert len(pin.blocks) == 16
    with pytest.raises(Overloaded):
        rig.puts.reserve(keys(60), BLOCK_BYTES, owner="w")
    none = await rig.store.pin(keys(50), owner="r", asked_ms=0)
    assert none.lease is None
    assert pin.lease is not None
    rig.store.release_pin(pin.lease.lease_id)
    assert await rig.put([60]) == [60]


async def test_a_pin_that_is_not_released_ends_with_its_lease(rig: Rig) -> None:
    await rig.put([1])
    pin = await rig.store.pin(keys(1), owner="r", asked_ms=500)
    assert pin.lease is not None
    rig.now_ms = 400
    rig.store.renew_pin(pin.lease.lease_id, asked_ms=500)
    rig.now_ms = 899
    assert rig.store.expire() == 0
    rig.now_ms = 900
    with pytest.raises(NotFound):
        rig.store.renew_pin(pin.lease.lease_id, asked_ms=500)
    assert rig.store.expire() == 1
    assert rig.at_rest()


async def test_a_reservation_that_is_not_committed_ends_with_its_lease(rig: Rig) -> None:
    lease = rig.puts.reserve(keys(1, 2), BLOCK_BYTES, owner="w")
    assert lease is not None
    assert rig.puts.reserve(keys(1, 2), BLOCK_BYTES, owner="v") is None  # they are on their way
    assert rig.puts.reserved_blocks == 2
    rig.now_ms = lease.expires_ms
    with pytest.raises(NotFound):
        await rig.puts.commit(lease.lease_id, "s", rig.sources([1, 2]), timeout_s=1)
    assert rig.puts.expire() == 1
    assert rig.at_rest()
    assert await rig.put([1, 2]) == [1, 2]


async def test_a_commit_in_progress_does_not_expire_under_its_feet(rig: Rig) -> None:
    lease = rig.puts.reserve(keys(1, 2), BLOCK_BYTES, owner="w")
    assert lease is not None
    rig.transport.gate = asyncio.Event()
    commit = asyncio.create_task(rig.puts.commit(lease.lease_id, "s", rig.sources([1, 2]), timeout_s=5))
    await asyncio.sleep(0)
    rig.now_ms = lease.expires_ms + 1
    assert rig.puts.expire() == 0
    rig.puts.cancel(lease.lease_id)  # nor does a cancel take the slots that are being filled
    rig.transport.gate.set()
    assert (await commit)[0] == keys(1, 2)
    assert rig.store.lookup(keys(1, 2)) == [DRAM, DRAM]


async def test_a_cancelled_commit_publishes_nothing_and_frees_everything(rig: Rig) -> None:
    lease = rig.puts.reserve(keys(1, 2), BLOCK_BYTES, owner="w")
    assert lease is not None
    rig.transport.gate = asyncio.Event()
    commit = asyncio.create_task(rig.puts.commit(lease.lease_id, "s", rig.sources([1, 2]), timeout_s=5))
    await asyncio.sleep(0)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    assert rig.store.lookup(keys(1)) == []
    assert rig.at_rest()


async def test_blocks_that_do_not_arrive_or_do_not_match_are_refused(rig: Rig) -> None:
    rig.transport.error = PeerGone("dead")
    assert await rig.put([1, 2]) == []
    rig.transport.error = None
    lease = rig.puts.reserve(keys(1, 2, 3), BLOCK_BYTES, owner="w")
    assert lease is not None
    one, two, three = rig.sources([1, 2, 3])
    wrong = Source(two.key, two.address, two.n_bytes, one.checksum)
    short = Source(three.key, three.address, three.n_bytes - 1, three.checksum)
    stranger = Source(key(77), one.address, BLOCK_BYTES, one.checksum)
    committed, refused = await rig.puts.commit(
        lease.lease_id, "s", [one, wrong, short, stranger], timeout_s=5
    )
    assert committed == keys(1)
    assert refused == keys(2, 3, 77)
    assert rig.store.lookup(keys(1)) == [DRAM]
    assert not rig.store.contains(key(2))
    rig.puts.cancel(lease.lease_id)
    # A repeated commit of what is held is answered as before.
    again = await rig.puts.commit(lease.lease_id, "s", [one], timeout_s=5)
    assert again == (keys(1), [])


async def test_a_slot_with_late_bytes_is_free_only_when_they_cannot_land(rig: Rig) -> None:
    lease = rig.puts.reserve(keys(1), BLOCK_BYTES, owner="w")
    assert lease is not None
    slot = lease.kept.slots[key(1)]
    rig.transport.error = TransferTimeout("stalled", quiet=False)
    rig.transport.late = Region(rig.dram.address_of(slot), 1)
    committed, _ = await rig.puts.commit(lease.lease_id, "s", rig.sources([1]), timeout_s=5)
    assert committed == []
    rig.puts.expire()
    assert rig.puts.reserved_blocks == 1
    rig.transport.error = rig.transport.late = None
    rig.puts.expire()
    assert rig.at_rest()


@pytest.mark.parametrize("block_bytes", [0, 16 * 2 * PAGE_BYTES // 8 + 1])
async def test_impossible_block_sizes_are_refused(rig: Rig, block_bytes: int) -> None:
    with pytest.raises(InvalidArgument, match="block_bytes"):
        rig.puts.reserve(keys(1), block_bytes, owner="w")


async def test_random_use_leaves_nothing_behind(rig: Rig) -> None:
    """Puts, pins, cancels, failures and expiry at random, concurrently; then the ledger is empty."""
    rng = random.Random(5)

    async def one(step: int) -> None:
        start = rng.randrange(40)
        chain = list(range(start, start + rng.randrange(1, 6)))
        try:
            if step % 2:
                async with asyncio.timeout(rng.choice([0.0005, 5])):
                    await rig.put(chain)
            else:
                async with asyncio.timeout(rng.choice([0.0005, 5])):
                    pin = await rig.store.pin(keys(*chain), owner="r", asked_ms=1000)
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
    assert await rig.store.write_behind.flush(timeout_s=10)
    assert rig.at_rest()

"""A store with memory and disk in one process; its disk uses a `DiskIo` of the tests."""

from __future__ import annotations

import asyncio
import ctypes
import random
import threading
from collections.abc import Sequence
from pathlib import Path

from libs.common.checksum import checksum, memory_at
from libs.common.telemetry.counters import Counters
from libs.common.transport.base import Landed, ReadOp, Region
from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from services.kvstore.core.puts import Puts, PutSource
from services.kvstore.core.store import BlockStore
from services.kvstore.disk.segments.io import SystemDiskIo
from services.kvstore.disk.set import DiskSet
from services.kvstore.disk.tier import DiskTier
from services.kvstore.dram.tier import DramTier
from slipstream.v1.common_pb2 import CacheTier

BLOCK_BYTES = 2 * PAGE_BYTES - 64
DRAM, NVME = CacheTier.CACHE_TIER_DRAM, CacheTier.CACHE_TIER_NVME


class CopyTransport:
    """A transport within this process: reads are copies and can fail on demand."""

    kind = "socket"
    session_id = "here"
    reads_in_flight = 0
    quarantined_bytes = 0

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.late: Region | None = None

    def register(self, buffer: object) -> Region:
        raise NotImplementedError

    def add_destination(self, buffer: object) -> Region:
        raise NotImplementedError

    async def read(
        self, session_id: str, reads: Sequence[ReadOp], *, timeout_s: float, landed: Landed | None = None
    ) -> None:
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        for op in reads:
            ctypes.memmove(op.local_address, op.remote_address, op.n_bytes)
            if landed is not None:
                landed(op)

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
        self.gate.wait(200)
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

    def sources(self, numbers: Sequence[int]) -> list[PutSource]:
        found = []
        for index, number in enumerate(numbers):
            address = self.memory.address + index * BLOCK_BYTES
            memory_at(address, BLOCK_BYTES)[:] = payload(number)
            found.append(PutSource(key(number), address, BLOCK_BYTES, checksum(payload(number))))
        return found

    async def put(self, numbers: Sequence[int]) -> list[int]:
        lease = self.puts.reserve([key(n) for n in numbers], BLOCK_BYTES, owner="w")
        if lease is None:
            return []
        committed, _ = await self.puts.commit(lease.lease_id, "s", self.sources(numbers), timeout_s=60)
        return [int.from_bytes(c, "little") for c in committed]

    async def to_disk_only(self, numbers: Sequence[int]) -> None:
        """Put blocks, wait until they are written, and drop them from memory."""
        assert self.store.write_behind is not None
        await self.put(numbers)
        assert await self.store.write_behind.flush(timeout_s=60)
        for number in numbers:
            block = self.dram.get(key(number))
            assert block is not None
            self.dram.table.drop(block)

    def at_rest(self) -> bool:
        """Check that no block is held without an owner and that every slot is accounted for."""
        self.dram.table.check()
        held = self.store.pins + self.puts.reservations + self.puts.reserved_blocks
        return held == 0 and self.store.leaked_blocks == 0


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(BLOCK_BYTES)

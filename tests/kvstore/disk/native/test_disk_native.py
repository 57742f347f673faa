"""Reads by native threads: the same bytes and errors as interpreter threads, and no leaks."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from libs.common import xxhash_library
from libs.common.checksum import KvChecksum, checksum
from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from services.kvstore.disk.native import library as compiled
from services.kvstore.disk.native.library import native_library
from services.kvstore.disk.native.reads import DIRECT, MISMATCH, PART, NativePool, NativeReader
from services.kvstore.disk.queues.queue import DiskQueue, Ended
from services.kvstore.disk.queues.writes import ThreadedWriter
from services.kvstore.disk.segment_format import Superblock
from services.kvstore.disk.segments.files import BlockRead, SegmentFiles
from services.kvstore.disk.segments.io import SystemDiskIo, uses_system_reads_and_writes
from services.kvstore.disk.segments.segment_file import SegmentFile
from services.kvstore.disk.table.block import DiskBlock
from services.kvstore.disk.tier import DiskTier
from services.kvstore.dram.slots import Slot
from slipstream.errors import DataCorrupt, FailedPrecondition, Unavailable
from tests.support.processes.open_files import open_files

N_SLOTS = 12
MOST_AT_DISK = 16  # reads, as in the library
RING_SETUP = 425  # io_uring's calls have the same numbers on all machines
SEGMENT_BYTES = N_SLOTS * 2 * PAGE_BYTES


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(PAGE_BYTES - 7 * number)


class Rig:
    """A segment with written slots, and a reader of it."""

    def __init__(self, directory: Path, *, with_ring: bool) -> None:
        library = native_library()
        assert library is not None
        self.files = SegmentFiles(directory, segment_bytes=SEGMENT_BYTES, io=SystemDiskIo())
        self.file = SegmentFile.create(
            self.files.path(0), Superblock(0, SEGMENT_BYTES, PAGE_BYTES), self.files.io, self.files.pool
        )
        self.files._files[0] = self.file
        self.memory = PageAlignedMemory(2 * N_SLOTS * PAGE_BYTES)
        for number in range(N_SLOTS):
            self.memory.view(number * PAGE_BYTES, len(payload(number)))[:] = payload(number)
        self.file.write(0, [self.memory.view(n * PAGE_BYTES, PAGE_BYTES) for n in range(N_SLOTS)])
        self.memory.buffer[:] = bytes(self.memory.n_bytes)
        self.reader = NativeReader(self.files, library, time.monotonic, with_ring=with_ring)

    def read_of(self, number: int, to: int) -> BlockRead:
        data = payload(number)
        block = DiskBlock(b"k" * 16, Slot(0, number, PAGE_BYTES), len(data), 1, checksum(data), number)
        return BlockRead(block, self.memory.address + to * PAGE_BYTES)

    async def read(self, numbers: list[int], *, to: int = 0) -> list[Ended]:
        """Read the slots into consecutive memory; return the result of each read."""
        ended: dict[int, Ended] = {}
        self.reader.add([self.read_of(n, to + at) for at, n in enumerate(numbers)], ended.__setitem__)
        async with asyncio.timeout(30):
            while len(ended) < len(numbers):
                await asyncio.sleep(0.001)
        return [ended[position] for position in range(len(numbers))]

    def close(self) -> None:
        assert len(self.reader) == 0 and self.reader.running_since_s is None
        self.reader.close(wait=True)
        self.reader.close(wait=True)
        self.files.close()


@pytest.mark.parametrize("with_ring", [True, False])
async def test_native_reads_return_each_block_or_its_own_error(tmp_path: Path, with_ring: bool) -> None:
    before = open_files()
    rig = Rig(tmp_path, with_ring=with_ring)
    for numbers in ([3], [0, 1, 2, 3, 4, 5], [11, 2, 7, 3, 8, 9, 10, 2], list(range(N_SLOTS))):
        assert await rig.read(numbers) == [None] * len(numbers)
        for to, number in enumerate(numbers):
            data = payload(number)
            assert bytes(rig.memory.view(to * PAGE_BYTES, len(data))) == data
    with rig.files.path(0).open("r+b") as file:
        file.seek(rig.file.superblock.payload_offset(5) + 9)
        file.write(b"\xff\x00\xff")
    ended = await rig.read([4, 5, 6])
    assert ended[0] is None and ended[2] is None and isinstance(ended[1], DataCorrupt)
    os.truncate(rig.files.path(0), rig.file.superblock.payload_offset(9))
    ended = await rig.read([7, 8, 9, 10])
    assert ended[:2] == [None, None]
    assert all(isinstance(each, OSError) and each.errno == errno.EIO for each in ended[2:])
    rig.close()
    assert not open_files() - before


@pytest.mark.parametrize("with_ring", [True, False])
async def test_many_concurrent_callers_and_a_cancel_of_waiting_reads(tmp_path: Path, with_ring: bool) -> None:
    rig = Rig(tmp_path, with_ring=with_ring)
    rng = random.Random(1)
    asked = [rng.randrange(N_SLOTS) for _ in range(600)]
    assert await asyncio.gather(*(rig.read([number], to=number) for number in asked)) == [[None]] * 600
    ended: list[Ended] = []
    gone = Unavailable("gone")
    for n_asked in range(5000, 50 * 5000, 5000):  # the threads may have read them all already
        rig.reader.add([rig.read_of(n % 12, n % 12) for n in range(5000)], lambda _, e: ended.append(e))
        rig.reader.cancel_waiting(gone)
        async with asyncio.timeout(30):
            while len(ended) < n_asked:
                await asyncio.sleep(0.001)
        if gone in ended:
            break
    assert set(ended) <= {None, gone} and gone in ended
    assert await rig.read([1, 2]) == [None, None]
    rig.close()


async def test_a_running_call_is_reported_until_it_returns() -> None:
    library = native_library()
    assert library is not None
    pool = NativePool(library, n_threads=1)
    memory = PageAlignedMemory(32 << 20)
    zeros = os.open("/dev/zero", os.O_RDONLY)
    part = PART.pack(7, zeros, 0, 0, memory.n_bytes, memory.address, memory.n_bytes, bytes(16))
    assert pool.oldest_s is None
    seen = 0
    deadline = time.monotonic() + 60
    while not seen:  # the read may end before this thread runs
        pool.add(part, 1, n_unended=1)
        found: list[tuple[int, int]] = []
        while not found:
            assert time.monotonic() < deadline
            seen += pool.oldest_s is not None
            found = pool.poll()
        assert found == [(7, MISMATCH)] and pool.oldest_s is None
    pool.close(wait=True)
    assert pool.poll() == [] and pool.oldest_s is None
    with pytest.raises(Unavailable):
        pool.add(part, 1, n_unended=1)
    os.close(zeros)


async def wait_for_ends(pool: NativePool, n: int) -> dict[int, int]:
    found: dict[int, int] = {}
    async with asyncio.timeout(30):
        while len(found) < n:
            found |= dict(pool.poll())
            await asyncio.sleep(0.001)
    return found


async def test_a_read_that_hangs_in_io_uring_blocks_no_other(tmp_path: Path) -> None:
    library = native_library()
    assert library is not None
    pool = NativePool(library, n_threads=2)
    memory = PageAlignedMemory((MOST_AT_DISK + 2) * PAGE_BYTES)
    data = random.Random(3).randbytes(PAGE_BYTES)
    (tmp_path / "file").write_bytes(data)
    file = os.open(tmp_path / "file", os.O_RDONLY)
    pipe, writes = os.pipe()  # io_uring reads pipes; a thread's preadv cannot

    def part(number: int, fd: int) -> bytes:
        address = memory.address + number * PAGE_BYTES
        return PART.pack(number, fd, DIRECT, 0, PAGE_BYTES, address, PAGE_BYTES, checksum(data))

    if pool.has_ring:
        pool.add(part(0, pipe), 1, n_unended=1)
        for n in range(1, 4):
            pool.add(part(n, file), 1, n_unended=2)
            assert await wait_for_ends(pool, 1) == {n: 0}
        assert pool.oldest_s is not None and memory.view(0, PAGE_BYTES) == bytes(PAGE_BYTES)
        os.write(writes, data)
        assert await wait_for_ends(pool, 1) == {0: 0} and memory.view(0, PAGE_BYTES) == data
        # The bound of reads at the disk is reached; the others can be cancelled.
        numbers = range(MOST_AT_DISK + 2)
        pool.add(b"".join(part(n, pipe) for n in numbers), len(numbers), n_unended=len(numbers))
        async with asyncio.timeout(30):
            while not pool.oldest_s:  # zero before the first start
                await asyncio.sleep(0.001)
        pool.cancel_waiting()
        given_up = await wait_for_ends(pool, 2)
        assert set(given_up.values()) == {-errno.ECANCELED}
        left = set(numbers) - set(given_up)
        assert pool.poll() == [] and pool.oldest_s is not None
        os.write(writes, data * len(left))
        assert await wait_for_ends(pool, len(left)) == dict.fromkeys(left, 0)
        # A thread repeats a short read, and its result counts.
        pool.add(part(0, pipe), 1, n_unended=1)
        os.write(writes, data[:100])
        assert await wait_for_ends(pool, 1) == {0: -errno.ESPIPE}
    else:
        pool.add(part(0, pipe), 1, n_unended=1)
        assert await wait_for_ends(pool, 1) == {0: -errno.ESPIPE}
    pool.add(part(1, file) + part(2, file), 2, n_unended=2)
    pool.close(wait=True)  # finishes waiting reads
    assert memory.view(PAGE_BYTES, 2 * PAGE_BYTES) == data + data
    for fd in (file, pipe, writes):
        os.close(fd)


async def test_thread_reads_start_behind_one_that_hangs_in_io_uring(tmp_path: Path) -> None:
    """A disk has both kinds of reads after its filesystem refused direct I/O for some file."""
    library = native_library()
    assert library is not None
    pool = NativePool(library, n_threads=2)
    memory = PageAlignedMemory(3 * PAGE_BYTES)
    data = random.Random(4).randbytes(PAGE_BYTES)
    (tmp_path / "file").write_bytes(data)
    file = os.open(tmp_path / "file", os.O_RDONLY)
    pipe, writes = os.pipe()
    places = [(pipe, DIRECT), (file, 0), (file, 0)]
    parts = [
        PART.pack(n, fd, flags, 0, PAGE_BYTES, memory.address + n * PAGE_BYTES, PAGE_BYTES, checksum(data))
        for n, (fd, flags) in enumerate(places)
    ]
    if pool.has_ring:
        for _ in range(20):  # with the ring's thread asleep, and spinning
            pool.add(b"".join(parts), 3, n_unended=3)
            assert await wait_for_ends(pool, 2) == {1: 0, 2: 0}
            os.write(writes, data)
            assert await wait_for_ends(pool, 1) == {0: 0}
    pool.close(wait=True)
    for fd in (file, pipe, writes):
        os.close(fd)


def test_io_uring_is_used_where_the_kernel_has_it() -> None:
    library = native_library()
    assert library is not None
    starts_disabled = ctypes.create_string_buffer(struct.pack("<8xI", 1 << 6), 120)  # io_uring_params
    descriptor = ctypes.CDLL(None).syscall(RING_SETUP, 8, starts_disabled)
    for with_ring in (True, False):
        pool = NativePool(library, n_threads=1, with_ring=with_ring)
        assert pool.has_ring == (with_ring and descriptor >= 0)
        pool.close(wait=True)
        assert not pool.has_ring
    if descriptor >= 0:
        os.close(descriptor)


@pytest.mark.parametrize("number", [RING_SETUP, 426, 427], ids=["setup", "enter", "register"])
def test_threads_read_where_any_call_of_io_uring_is_forbidden(tmp_path: Path, number: int) -> None:
    (tmp_path / "file").write_bytes(random.Random(4).randbytes(PAGE_BYTES))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kvstore.disk.native.confined", str(number), str(tmp_path / "file")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "False [(7, 0)]\n"), done.stderr


async def test_interpreter_threads_read_without_xxhash_or_with_another_disk_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class OverriddenDiskIo(SystemDiskIo):
        def preadv(self, fd: int, buffers: object, offset: int) -> int:
            raise AssertionError

    assert uses_system_reads_and_writes(SystemDiskIo()) and not uses_system_reads_and_writes(
        OverriddenDiskIo()
    )
    monkeypatch.setattr(xxhash_library, "library_path", lambda: "/nowhere")
    xxhash_library.xxh3.cache_clear()
    native_library.cache_clear()
    try:
        tier = DiskTier(tmp_path / "kv", disk_bytes=1 << 20)
        assert isinstance(tier._reads, DiskQueue) and isinstance(tier._writes, ThreadedWriter)
        tier.open()
        memory = PageAlignedMemory(2 * PAGE_BYTES)
        memory.view(0, 100)[:] = bytes(range(100))
        key, digest = b"k" * 16, checksum(bytes(range(100)))
        assert await tier.write(key, memory.address, 100, digest)
        assert await tier.read_many([(key, memory.address + PAGE_BYTES)]) == [(100, digest)]
        tier.close()
        with pytest.raises(FailedPrecondition, match="cluster secret"):
            KvChecksum(b"key")
    finally:
        native_library.cache_clear()
        xxhash_library.xxh3.cache_clear()


def test_a_missing_library_raises_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "LIBRARY", tmp_path / "_disk_io.so")
    native_library.cache_clear()
    try:
        with pytest.raises(FailedPrecondition, match="reinstall slipstream-server"):
            native_library()
    finally:
        native_library.cache_clear()

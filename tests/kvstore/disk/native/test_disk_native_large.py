"""Native reads of large blocks: checksums in pieces, bounds at the disk, spinning threads."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.common.checksum import checksum
from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from services.kvstore.disk.native.library import native_library
from services.kvstore.disk.native.reads import DIRECT, FOLLOWED, MISMATCH, PART, NativePool

MIB = 1 << 20
PIECE_BYTES = 256 << 10  # as in disk_io.c
SLOT_BYTES = 3 * PIECE_BYTES


@pytest.fixture(params=[True, False], ids=["ring", "threads"])
def pool(request: pytest.FixtureRequest) -> Iterator[NativePool]:
    library = native_library()
    assert library is not None
    pool = NativePool(library, n_threads=2, with_ring=request.param)
    yield pool
    pool.close(wait=True)


async def wait_for_ends(pool: NativePool, n: int) -> dict[int, int]:
    found: dict[int, int] = {}
    async with asyncio.timeout(60):
        while len(found) < n:
            found |= dict(pool.poll())
            await asyncio.sleep(0.001)
    return found


class Slots:
    """The slots of a file, and memory for each."""

    def __init__(self, path: Path, n: int) -> None:
        self.n = n
        self.data = random.Random(n).randbytes(n * SLOT_BYTES)
        path.write_bytes(self.data)
        self.fd = os.open(path, os.O_RDWR)
        self.memory = PageAlignedMemory(n * SLOT_BYTES)

    def part(self, number: int, n_bytes: int, flags: int = DIRECT) -> bytes:
        """Describe a read of slot `number` with a block of `n_bytes`."""
        at = number * SLOT_BYTES
        expected = checksum(self.data[at : at + n_bytes])
        return PART.pack(number, self.fd, flags, at, SLOT_BYTES, self.memory.address + at, n_bytes, expected)

    def holds(self, number: int, n_bytes: int) -> bool:
        at = number * SLOT_BYTES
        return bool(self.memory.view(at, n_bytes) == self.data[at : at + n_bytes])


async def test_a_checksum_in_pieces_equals_that_of_the_whole(tmp_path: Path, pool: NativePool) -> None:
    edges = [PIECE_BYTES * pieces + more for pieces in (1, 2) for more in (-1, 0, 1, 63, 64, 65, 1025)]
    sizes = [1, 17, 241, *edges, SLOT_BYTES - 1, SLOT_BYTES]
    slots = Slots(tmp_path / "file", len(sizes))
    pool.add(b"".join(map(slots.part, range(slots.n), sizes)), slots.n, n_unended=slots.n)
    assert await wait_for_ends(pool, slots.n) == dict.fromkeys(range(slots.n), 0)
    assert all(map(slots.holds, range(slots.n), sizes))
    os.close(slots.fd)


async def test_one_wrong_byte_in_any_piece_is_found(tmp_path: Path, pool: NativePool) -> None:
    slots = Slots(tmp_path / "file", 24)
    rng = random.Random(5)
    n_bytes = SLOT_BYTES - 100
    wrong = {number: rng.randrange(n_bytes) for number in range(0, slots.n, 2)}
    # Some odd blocks are damaged behind their payload.
    places = wrong | {number: SLOT_BYTES - 1 for number in range(1, slots.n, 4)}
    for number, place in places.items():
        at = number * SLOT_BYTES + place
        os.pwrite(slots.fd, bytes([slots.data[at] ^ 1 << rng.randrange(8)]), at)
    # Single reads and runs of two.
    for followed in (0, FOLLOWED):
        parts = b"".join(
            slots.part(number, n_bytes, DIRECT | (0 if number % 2 else followed)) for number in range(slots.n)
        )
        pool.add(parts, slots.n, n_unended=slots.n)
        expected = {number: MISMATCH if number in wrong else 0 for number in range(slots.n)}
        assert await wait_for_ends(pool, slots.n) == expected
    os.close(slots.fd)


async def test_a_file_that_ends_in_the_middle_of_a_block_fails_that_block_alone(
    tmp_path: Path, pool: NativePool
) -> None:
    slots = Slots(tmp_path / "file", 6)
    os.truncate(tmp_path / "file", 4 * SLOT_BYTES + 2 * PIECE_BYTES + 5)
    for followed in (0, FOLLOWED):
        parts = b"".join(
            slots.part(number, SLOT_BYTES, DIRECT | (followed if number in (0, 2, 4) else 0))
            for number in range(6)
        )
        pool.add(parts, 6, n_unended=6)
        found = await wait_for_ends(pool, 6)
        assert found == dict.fromkeys(range(4), 0) | dict.fromkeys((4, 5), -errno.EIO)
        assert all(slots.holds(number, SLOT_BYTES) for number in range(4))
    os.close(slots.fd)


async def wait_for_starts(pool: NativePool) -> None:
    """Wait until some reads, and with them all that may, have started."""
    async with asyncio.timeout(30):
        while not pool.oldest_s:
            await asyncio.sleep(0.001)


@pytest.mark.parametrize(
    ("asked_mib", "at_disk_mib"),
    [(2, 2), (4, 2), (8, 4), (16, 8), (20, 10), (32, 12), (64, 12)],
    ids=lambda mib: f"{mib}mib",
)
async def test_half_of_the_requested_bytes_are_at_the_disk(asked_mib: int, at_disk_mib: int) -> None:
    library = native_library()
    assert library is not None
    pool = NativePool(library, n_threads=1)
    if not pool.has_ring:
        pool.close(wait=True)
        pytest.skip("this kernel refuses io_uring, and threads have no turns")
    memory = PageAlignedMemory(2 * MIB)
    pipe, writes = os.pipe()  # io_uring can read pipes and waits for bytes
    n = asked_mib // 2
    parts = b"".join(
        PART.pack(number, pipe, DIRECT, 0, 2 * MIB, memory.address, 2 * MIB, bytes(16)) for number in range(n)
    )
    pool.add(parts, n, n_unended=n)
    await wait_for_starts(pool)
    pool.cancel_waiting()
    n_given_up = n - at_disk_mib // 2
    assert [result for _, result in pool.poll()] == [-errno.ECANCELED] * n_given_up
    os.close(writes)  # all other reads are short, and a thread's preadv cannot read a pipe
    assert set((await wait_for_ends(pool, n - n_given_up)).values()) == {-errno.ESPIPE}
    assert pool.oldest_s is None
    pool.close(wait=True)
    os.close(pipe)


async def test_threads_do_not_spin_for_a_hanging_read_or_without_requests() -> None:
    library = native_library()
    assert library is not None
    pool = NativePool(library, n_threads=1)
    memory = PageAlignedMemory(PAGE_BYTES)
    data = random.Random(6).randbytes(PAGE_BYTES)
    pipe, writes = os.pipe()
    part = PART.pack(1, pipe, DIRECT, 0, PAGE_BYTES, memory.address, PAGE_BYTES, checksum(data))

    async def cpu_s() -> float:
        begun_s = time.process_time()
        await asyncio.sleep(0.5)
        return time.process_time() - begun_s

    if pool.has_ring:
        for _ in range(20):  # short waits, after which the thread may spin
            pool.add(part, 1, n_unended=1)
            os.write(writes, data)
            assert await wait_for_ends(pool, 1) == {1: 0}
        assert await cpu_s() < 0.2
        pool.add(part, 1, n_unended=1)
        await wait_for_starts(pool)
        assert await cpu_s() < 0.2
        os.write(writes, data)
        assert await wait_for_ends(pool, 1) == {1: 0}
    pool.close(wait=True)
    for fd in (pipe, writes):
        os.close(fd)

"""Reads of blocks in threads that never take the interpreter's lock (`csrc/disk_io.c`).

A read and its checksum are one job, handed in and taken back in batches: the event loop pays a few
microseconds a block, and four readers of single blocks keep a disk as busy as four threads would. Where the
library cannot be compiled threads of the interpreter do the same work.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import struct
from collections.abc import Callable, Sequence

from services.kvstore.disk.native.library import ENDED, Library, native_library
from services.kvstore.disk.queue import Ended, OnEnd
from services.kvstore.disk.reads import READ_THREADS, BlockReader, place, threaded_reader
from services.kvstore.disk.segments.files import BlockRead, SegmentFiles, follows
from services.kvstore.disk.segments.io import makes_system_calls
from slipstream.errors import DataCorrupt, Unavailable

log = logging.getLogger(__name__)

MISMATCH = 1
FOLLOWED, DIRECT = 1, 2  # the next part goes with it; the file is open for direct I/O
PART = struct.Struct("<QiIqQQQ16s")
MOST_AT_DISK = 16  # reads, as the library has it
_TAKEN_AT_ONCE = 256


class NativePool:
    """Threads of the library. For one thread, the event loop's."""

    def __init__(self, library: Library, *, n_threads: int, with_ring: bool = True) -> None:
        """`with_ring`: use the kernel's ring for direct I/O where there is one."""
        self._library = library
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pool = library.waiting_calls.kv_pool_open(
            n_threads, self.event_fd, ctypes.byref(library.hashes), with_ring
        )
        if not self._pool:
            os.close(self.event_fd)
            raise MemoryError("no memory for the disk's threads")
        self._taken = ctypes.create_string_buffer(ENDED.size * _TAKEN_AT_ONCE)

    def add(self, parts: bytes | bytearray, n_parts: int, *, n_unended: int) -> None:
        """Hand in parts. `n_unended`: all that were and that `take` did not give yet."""
        if not self._pool:
            raise Unavailable("the disk is closed")
        if not self._library.calls.kv_pool_add(self._pool, bytes(parts), n_parts, n_unended):
            raise MemoryError("no memory for the disk's queue")

    def take(self) -> list[tuple[int, int]]:
        """(id, result) of all that ended since."""
        found: list[tuple[int, int]] = []
        n = _TAKEN_AT_ONCE if self._pool else 0
        while n == _TAKEN_AT_ONCE:
            n = self._library.calls.kv_pool_take(self._pool, self._taken, _TAKEN_AT_ONCE)
            found += ENDED.iter_unpack(memoryview(self._taken)[: n * ENDED.size])
        return found

    def give_up_waiting(self) -> None:
        """End what no thread has begun, with ECANCELED."""
        if self._pool:
            self._library.calls.kv_pool_give_up(self._pool)

    @property
    def oldest_s(self) -> float | None:
        """For how long the oldest running call runs; None when none does."""
        oldest_ns: int = self._library.calls.kv_pool_oldest_ns(self._pool) if self._pool else -1
        return None if oldest_ns < 0 else oldest_ns / 1e9

    @property
    def has_ring(self) -> bool:
        """Whether direct reads go through the kernel's ring."""
        return bool(self._pool and self._library.calls.kv_pool_has_ring(self._pool))

    @property
    def open(self) -> bool:
        """Whether it was not closed."""
        return bool(self._pool)

    def close(self, *, wait: bool) -> None:
        """End the threads. Without `wait` they and what they use stay: a call of theirs hangs."""
        if wait and self._pool:
            self._library.waiting_calls.kv_pool_close(self._pool)
            self._pool = None
            os.close(self.event_fd)

    def __del__(self) -> None:
        if getattr(self, "_pool", None) and self.oldest_s is None:
            self.close(wait=True)


class NativeReader:
    """A `BlockReader` over a pool of its own."""

    def __init__(
        self,
        files: SegmentFiles,
        library: Library,
        clock_s: Callable[[], float],
        *,
        with_ring: bool = True,
    ) -> None:
        self._files = files
        self._pool = NativePool(library, n_threads=READ_THREADS, with_ring=with_ring)
        self._clock_s = clock_s
        self._tickets: dict[int, tuple[OnEnd, int, BlockRead]] = {}
        self._next = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def running_since_s(self) -> float | None:
        oldest_s = self._pool.oldest_s
        return None if oldest_s is None else self._clock_s() - oldest_s

    def add(self, items: Sequence[BlockRead], on_end: OnEnd) -> None:
        self._listen()
        tickets: dict[int, tuple[OnEnd, int, BlockRead]] = {}
        order = range(len(items))
        if len(items) > 1:
            order = sorted(order, key=lambda at: place(items[at]))  # type: ignore[assignment]
        packed, n_run, flags = bytearray(), 1, DIRECT if self._files.io.direct else 0
        for index, at in enumerate(order):
            item, self._next = items[at], self._next + 1
            slot, block = item.slot, item.block
            following = items[order[index + 1]].slot if index + 1 < len(items) else None
            followed = following is not None and follows(slot, following, n_run)
            n_run = n_run + 1 if followed else 1
            file = self._files.file(slot.slab)
            offset = file.superblock.payload_offset(slot.index)
            packed += PART.pack(
                self._next,
                file.fd,
                flags | FOLLOWED if followed else flags,
                offset,
                slot.slot_bytes,
                item.address,
                block.n_bytes,
                block.checksum,
            )
            tickets[self._next] = on_end, at, item
        # Takes all or none; only then is anybody owed an end.
        self._pool.add(packed, len(items), n_unended=len(self._tickets) + len(tickets))
        self._tickets.update(tickets)

    def give_up_waiting(self, error: Exception) -> None:
        self._pool.give_up_waiting()
        self._error = error
        self._deliver()

    def close(self, *, wait: bool) -> None:
        if self._loop is not None and not self._loop.is_closed() and self._pool.open:
            self._loop.remove_reader(self._pool.event_fd)
        self._pool.close(wait=wait)

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop and self._pool.open:
            self._loop = loop
            loop.add_reader(self._pool.event_fd, self._deliver)

    def _deliver(self) -> None:
        for number, result in self._pool.take():
            on_end, position, item = self._tickets.pop(number)
            try:
                on_end(position, self._outcome(item, result))
            except Exception:  # a defect; the others are told all the same
                log.exception("the end of a read was not taken")

    def _outcome(self, item: BlockRead, result: int) -> Ended:
        if not result:
            return None
        if result == MISMATCH:
            return DataCorrupt(f"block {item.block.key.hex()} on disk does not verify")
        if result == -errno.ECANCELED and self._error is not None:
            return self._error
        return OSError(-result, os.strerror(-result))


def open_reader(files: SegmentFiles, clock_s: Callable[[], float]) -> BlockReader:
    """The quickest reader for these files."""
    library = native_library() if makes_system_calls(files.io) else None
    if library is None:
        return threaded_reader(files, clock_s)
    return NativeReader(files, library, clock_s)

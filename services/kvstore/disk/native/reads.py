"""Reads of blocks in threads that never take the interpreter's lock (`csrc/disk_io.c`).

A read and its checksum are one job, submitted and polled in batches. A block costs the event loop a few
microseconds, and four readers of single blocks keep a disk as busy as four threads would. Without the
library, interpreter threads do the same work.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import struct
from collections.abc import Callable, Sequence

from services.kvstore.disk.native.library import ENDED, DiskLibrary, native_library
from services.kvstore.disk.queues.queue import Ended, OnEnd
from services.kvstore.disk.queues.reads import READ_THREADS, BlockReader, location, threaded_reader
from services.kvstore.disk.segments.files import BlockRead, SegmentFiles, follows
from services.kvstore.disk.segments.io import uses_system_reads_and_writes
from slipstream.errors import DataCorrupt, Unavailable

log = logging.getLogger(__name__)

MISMATCH = 1
FOLLOWED, DIRECT = 1, 2  # the next part is its neighbour; the file uses direct I/O
PART = struct.Struct("<QiIqQQQ16s")
_POLLED_AT_ONCE = 256


class NativePool:
    """The library's read threads. One caller thread, the event loop's."""

    def __init__(
        self, library: DiskLibrary, *, n_threads: int, secret: bytes = b"", with_ring: bool = True
    ) -> None:
        """`secret`: of the checksum. `with_ring`: use io_uring for direct I/O where the kernel has it."""
        self._library = library
        self._hashes = library.hashes(secret)  # keeps the secret's bytes alive
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pool = library.waiting_calls.kv_pool_open(
            n_threads, self.event_fd, ctypes.byref(self._hashes), with_ring
        )
        if not self._pool:
            os.close(self.event_fd)
            raise MemoryError("no memory for the disk's threads")
        self._polled = ctypes.create_string_buffer(ENDED.size * _POLLED_AT_ONCE)

    def add(self, parts: bytes | bytearray, n_parts: int, *, n_unended: int) -> None:
        """Submit parts. `n_unended`: all submitted parts that `poll` has not returned yet."""
        if not self._pool:
            raise Unavailable("the disk is closed")
        if not self._library.calls.kv_pool_add(self._pool, bytes(parts), n_parts, n_unended):
            raise MemoryError("no memory for the disk's queue")

    def poll(self) -> list[tuple[int, int]]:
        """(id, result) of all parts that ended since the last poll."""
        found: list[tuple[int, int]] = []
        n = _POLLED_AT_ONCE if self._pool else 0
        while n == _POLLED_AT_ONCE:
            n = self._library.calls.kv_pool_poll(self._pool, self._polled, _POLLED_AT_ONCE)
            found += ENDED.iter_unpack(memoryview(self._polled)[: n * ENDED.size])
        return found

    def cancel_waiting(self) -> None:
        """End all parts that no thread has started, with ECANCELED."""
        if self._pool:
            self._library.calls.kv_pool_cancel(self._pool)

    @property
    def oldest_s(self) -> float | None:
        """Run time of the oldest running call; None when none runs."""
        oldest_ns: int = self._library.calls.kv_pool_oldest_ns(self._pool) if self._pool else -1
        return None if oldest_ns < 0 else oldest_ns / 1e9

    @property
    def has_ring(self) -> bool:
        """Whether direct reads use io_uring."""
        return bool(self._pool and self._library.calls.kv_pool_has_ring(self._pool))

    @property
    def open(self) -> bool:
        """Whether `close` has not ended the threads."""
        return bool(self._pool)

    def close(self, *, wait: bool) -> None:
        """End the threads. Without `wait` they keep running with their memory, since a call hangs."""
        if wait and self._pool:
            self._library.waiting_calls.kv_pool_close(self._pool)
            self._pool = None
            os.close(self.event_fd)

    def __del__(self) -> None:
        if getattr(self, "_pool", None) and self.oldest_s is None:
            self.close(wait=True)


class NativeReader:
    """A `BlockReader` with its own `NativePool`."""

    def __init__(
        self,
        files: SegmentFiles,
        library: DiskLibrary,
        clock_s: Callable[[], float],
        *,
        with_ring: bool = True,
    ) -> None:
        self._files = files
        self._pool = NativePool(
            library, n_threads=READ_THREADS, secret=files.checksum.secret, with_ring=with_ring
        )
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
            order = sorted(order, key=lambda at: location(items[at]))  # type: ignore[assignment]
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
        # The pool takes all parts or none; only then their ends are owed.
        self._pool.add(packed, len(items), n_unended=len(self._tickets) + len(tickets))
        self._tickets.update(tickets)

    def cancel_waiting(self, error: Exception) -> None:
        self._pool.cancel_waiting()
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
        for number, result in self._pool.poll():
            on_end, position, item = self._tickets.pop(number)
            try:
                on_end(position, self._outcome(item, result))
            except Exception:  # a defect: the other reads are still reported
                log.exception("a read's callback failed")

    def _outcome(self, item: BlockRead, result: int) -> Ended:
        if not result:
            return None
        if result == MISMATCH:
            return DataCorrupt(f"block {item.block.key.hex()} on disk does not verify")
        if result == -errno.ECANCELED and self._error is not None:
            return self._error
        return OSError(-result, os.strerror(-result))


def open_reader(files: SegmentFiles, clock_s: Callable[[], float]) -> BlockReader:
    """The fastest reader for these files."""
    library = native_library() if uses_system_reads_and_writes(files.io) else None
    if library is None:
        return threaded_reader(files, clock_s)
    return NativeReader(files, library, clock_s)

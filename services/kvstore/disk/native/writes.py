"""Durable groups of blocks without the interpreter (`csrc/disk_write.c`).

The event loop packs a group and submits it with one call. Library threads write payloads, sync, write headers
and sync again; one wake-up of the loop reports the whole group. An interpreter thread only creates or cuts
segments before.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import struct
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from services.kvstore.disk.native.library import ENDED, DiskLibrary, native_library
from services.kvstore.disk.queues.queue import Ended, OnEnd
from services.kvstore.disk.queues.writes import (
    GROUPS_AT_ONCE,
    MAX_GROUP_BLOCKS,
    WRITE_THREADS,
    DiskWriter,
    ThreadedWriter,
    pop_group,
)
from services.kvstore.disk.segment_format import SEALED_BYTES
from services.kvstore.disk.segments.files import BlockWrite, SegmentFiles
from services.kvstore.disk.segments.io import DiskIo, SystemDiskIo, uses_system_reads_and_writes
from services.kvstore.disk.segments.segment_file import SyncFailed
from slipstream.errors import Unavailable

log = logging.getLogger(__name__)

BLOCK = struct.Struct(f"<QqqQQQ{SEALED_BYTES}sq")
SYNC_FAILED = 1 << 20  # added to the error number of a sync; alone: an earlier sync failed


@dataclass(frozen=True, slots=True)
class WriteCalls:
    """C functions that replace the system's `pwritev` and `fdatasync`."""

    write: Any = None
    sync: Any = None


class NativeWriter:
    """A `DiskWriter` with threads of the library."""

    def __init__(
        self,
        files: SegmentFiles,
        library: DiskLibrary,
        clock_s: Callable[[], float],
        calls: WriteCalls | None = None,
    ) -> None:
        """`calls`: the disk of a test."""
        self._files = files
        self._library = library
        self._clock_s = clock_s
        self._calls = calls or WriteCalls()  # the library has their addresses
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._writer = library.calls.kv_writer_open(
            WRITE_THREADS, self._event_fd, library.hash, self._calls.write, self._calls.sync
        )
        if not self._writer:
            os.close(self._event_fd)
            raise MemoryError("no memory for the disk's threads")
        self._polled = ctypes.create_string_buffer(ENDED.size * MAX_GROUP_BLOCKS)
        self._makers = ThreadPoolExecutor(GROUPS_AT_ONCE, thread_name_prefix="kv-segment")
        self._making: dict[int, float] = {}  # groups whose segments are being created -> start
        self._waiting: deque[BlockWrite] = deque()
        self._tickets: dict[int, tuple[OnEnd, int]] = {}  # waiting items, by their identity
        self._running: dict[int, tuple[OnEnd, int, BlockWrite]] = {}
        self._next = 0
        self._n_groups = 0
        self._starting = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._tickets) + len(self._running)

    @property
    def running_since_s(self) -> float | None:
        since_s = list(self._making.values())
        oldest_ns: int = self._library.calls.kv_writer_oldest_ns(self._writer) if self._writer else -1
        if oldest_ns >= 0:
            since_s.append(self._clock_s() - oldest_ns / 1e9)
        return min(since_s, default=None)

    def add(self, items: Sequence[BlockWrite], on_end: OnEnd) -> None:
        self._listen()
        if items:
            self._start_soon()
        for position, item in enumerate(items):
            self._tickets[id(item)] = on_end, position
        self._waiting.extend(items)
        if len(self._waiting) >= MAX_GROUP_BLOCKS and self._n_groups < GROUPS_AT_ONCE:
            self._start()  # a full group need not wait for more items of this loop iteration

    def cancel_waiting(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, deque()
        for item in waiting:
            self._report(self._tickets.pop(id(item)), error)

    def close(self, *, wait: bool) -> None:
        if self._loop is not None and not self._loop.is_closed() and self._writer:
            self._loop.remove_reader(self._event_fd)
        self._makers.shutdown(wait=wait)
        if wait and self._writer:
            self._library.waiting_calls.kv_writer_close(self._writer)
            self._writer = None
            os.close(self._event_fd)

    def __del__(self) -> None:
        if getattr(self, "_writer", None) and self.running_since_s is None:
            self.close(wait=True)

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop and self._writer:
            self._loop = loop
            loop.add_reader(self._event_fd, self._deliver)

    def _start_soon(self) -> None:
        if not self._starting:
            self._starting = True
            asyncio.get_running_loop().call_soon(self._start_what_waits)

    def _start_what_waits(self) -> None:
        self._starting = False
        self._start()

    def _start(self) -> None:
        """Start as many groups as may run at once."""
        if not self._writer:
            self.cancel_waiting(Unavailable("the disk is closed"))
        while self._waiting and self._n_groups < GROUPS_AT_ONCE:
            group = pop_group(self._waiting)
            for item in group:
                self._next += 1
                on_end, position = self._tickets.pop(id(item))
                self._running[self._next] = on_end, position, item
            numbers = range(self._next - len(group) + 1, self._next + 1)
            self._n_groups += 1
            try:
                if self._files.are_ready(group):
                    self._hand_in(numbers)
                else:
                    self._make_segments(numbers, group)
            except Exception as error:
                self._end_group(numbers, error)

    def _make_segments(self, numbers: range, group: Sequence[BlockWrite]) -> None:
        """Create or cut the group's segments in a thread, then submit the blocks that have one."""
        loop = asyncio.get_running_loop()
        making = loop.run_in_executor(self._makers, self._files.make_ready, group)
        self._making[numbers.start] = self._clock_s()

        def made(found: asyncio.Future[dict[int, Exception]]) -> None:
            del self._making[numbers.start]
            if found.cancelled():
                self._end_group(numbers, Unavailable("the disk is closed"))
                return
            if (error := found.exception()) is not None:
                self._end_group(numbers, Unavailable(f"no segment could be made: {error}"))
                return
            failed = found.result()
            left = []
            for number in numbers:
                on_end, position, item = self._running[number]
                if item.slot.slab in failed:
                    del self._running[number]
                    self._report((on_end, position), failed[item.slot.slab])
                else:
                    left.append(number)
            try:
                self._hand_in(left)
            except Exception as defect:
                self._end_group(left, defect)

        making.add_done_callback(made)

    def _hand_in(self, numbers: Sequence[int]) -> None:
        """Submit a group whose segments are all ready. Raises MemoryError, Unavailable."""
        if not numbers:
            self._group_ended()
            return
        if not self._writer:
            raise Unavailable("the disk is closed")
        packed = bytearray()
        for number in numbers:
            item = self._running[number][2]
            slot = item.slot
            file = self._files.file(slot.slab)
            cut = file.superblock
            packed += BLOCK.pack(
                number,
                cut.payload_offset(slot.index),
                cut.header_offset(slot.index),
                slot.slot_bytes,
                item.address,
                file.sync_state_address,
                item.header.fields(),
                file.fd,
            )
        if not self._library.calls.kv_writer_add(self._writer, bytes(packed), len(numbers)):
            raise MemoryError("no memory for the disk's queue")
        self._files.n_syncs += 2 * len({self._running[number][2].slot.slab for number in numbers})

    def _deliver(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event_fd)
        ended: list[tuple[int, int]] = []
        poll, size = self._library.calls.kv_writer_poll, MAX_GROUP_BLOCKS
        while self._writer and (n := poll(self._writer, self._polled, size)):
            ended += ENDED.iter_unpack(self._polled.raw[: n * ENDED.size])
            self._n_groups -= 1
        self._start()  # before the reports, so that the disk does not wait for them
        for number, result in ended:
            on_end, position, _ = self._running.pop(number)
            self._report((on_end, position), None if not result else _error(-result))

    def _end_group(self, numbers: Sequence[int], error: Exception) -> None:
        self._group_ended()
        for number in numbers:
            on_end, position, _ = self._running.pop(number)
            self._report((on_end, position), error)

    def _group_ended(self) -> None:
        self._n_groups -= 1
        if self._waiting:
            self._start_soon()

    def _report(self, ticket: tuple[OnEnd, int], outcome: Ended) -> None:
        on_end, position = ticket
        try:
            on_end(position, outcome)
        except Exception:  # a defect: the other writes are still reported
            log.exception("a write's callback failed")


def open_writer(files: SegmentFiles, clock_s: Callable[[], float]) -> DiskWriter:
    """The fastest writer for these files."""
    library = native_library() if uses_system_sync(files.io) else None
    return ThreadedWriter(files, clock_s) if library is None else NativeWriter(files, library, clock_s)


def uses_system_sync(io: DiskIo) -> bool:
    """Whether all calls of a write are the system's own."""
    return uses_system_reads_and_writes(io) and type(io).fdatasync is SystemDiskIo.fdatasync


def _error(number: int) -> Exception:
    if number == SYNC_FAILED:
        return SyncFailed("an earlier sync of the segment failed")
    if number > SYNC_FAILED:
        return SyncFailed(os.strerror(number - SYNC_FAILED))
    return OSError(number or errno.EIO, os.strerror(number or errno.EIO))

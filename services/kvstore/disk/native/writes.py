"""Groups of blocks made durable without the interpreter (`csrc/disk_write.c`).

The event loop packs a group and hands it in with one call; payloads, syncs and headers follow each other in
threads of the library, and one wake of the loop tells how all blocks of a group ended. Only a segment that
must be made or cut first is that in a thread of the interpreter.
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

from services.kvstore.disk.native.library import ENDED, Library, native_library
from services.kvstore.disk.queue import Ended, OnEnd
from services.kvstore.disk.segments.files import BlockWrite, SegmentFiles
from services.kvstore.disk.segments.format import SEALED_BYTES
from services.kvstore.disk.segments.io import DiskIo, SystemDiskIo, makes_system_calls
from services.kvstore.disk.segments.segment_file import SyncFailed
from services.kvstore.disk.writes import (
    GROUPS_AT_ONCE,
    MAX_GROUP_BLOCKS,
    WRITE_THREADS,
    DiskWriter,
    ThreadedWriter,
    take_group,
)
from slipstream.errors import Unavailable

log = logging.getLogger(__name__)

BLOCK = struct.Struct(f"<QqqQQQ{SEALED_BYTES}sq")
SYNC_FAILED = 1 << 20  # added to the error number of a sync; alone: an earlier one had failed


@dataclass(frozen=True, slots=True)
class Calls:
    """What the library calls instead of the system's `pwritev` and `fdatasync`: C functions."""

    write: Any = None
    sync: Any = None


class NativeWriter:
    """A `DiskWriter` over threads of the library."""

    def __init__(
        self, files: SegmentFiles, library: Library, clock_s: Callable[[], float], calls: Calls | None = None
    ) -> None:
        """`calls`: for tests, which bring a disk of their own."""
        self._files = files
        self._library = library
        self._clock_s = clock_s
        self._calls = calls or Calls()  # kept: the library has their addresses
        self._event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._writer = library.calls.kv_writer_open(
            WRITE_THREADS, self._event_fd, library.hash, self._calls.write, self._calls.sync
        )
        if not self._writer:
            os.close(self._event_fd)
            raise MemoryError("no memory for the disk's threads")
        self._taken = ctypes.create_string_buffer(ENDED.size * MAX_GROUP_BLOCKS)
        self._makers = ThreadPoolExecutor(GROUPS_AT_ONCE, thread_name_prefix="kv-segment")
        self._making: dict[int, float] = {}  # groups whose segments are being made, and since when
        self._waiting: deque[BlockWrite] = deque()
        self._tickets: dict[int, tuple[OnEnd, int]] = {}  # of what waits, by the identity of the item
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
            self._start()  # a whole group need not wait for what else comes in this turn of the loop

    def give_up_waiting(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, deque()
        for item in waiting:
            self._tell(self._tickets.pop(id(item)), error)

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
        """Begin as many groups as there may be at once."""
        if not self._writer:
            self.give_up_waiting(Unavailable("the disk is closed"))
        while self._waiting and self._n_groups < GROUPS_AT_ONCE:
            group = take_group(self._waiting)
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
        """Make or cut the group's segments in a thread, then hand in those blocks that have one."""
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
                    self._tell((on_end, position), failed[item.slot.slab])
                else:
                    left.append(number)
            try:
                self._hand_in(left)
            except Exception as defect:
                self._end_group(left, defect)

        making.add_done_callback(made)

    def _hand_in(self, numbers: Sequence[int]) -> None:
        """Give a group to the library; all its segments are there. Raises MemoryError, Unavailable; then none
        was taken."""
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
        take, size = self._library.calls.kv_writer_take, MAX_GROUP_BLOCKS
        while self._writer and (n := take(self._writer, self._taken, size)):
            ended += ENDED.iter_unpack(self._taken.raw[: n * ENDED.size])
            self._n_groups -= 1
        self._start()  # the disk need not wait until all have heard
        for number, result in ended:
            on_end, position, _ = self._running.pop(number)
            self._tell((on_end, position), None if not result else _error(-result))

    def _end_group(self, numbers: Sequence[int], error: Exception) -> None:
        self._group_ended()
        for number in numbers:
            on_end, position, _ = self._running.pop(number)
            self._tell((on_end, position), error)

    def _group_ended(self) -> None:
        self._n_groups -= 1
        if self._waiting:
            self._start_soon()

    def _tell(self, ticket: tuple[OnEnd, int], outcome: Ended) -> None:
        on_end, position = ticket
        try:
            on_end(position, outcome)
        except Exception:  # a defect; the others are told all the same
            log.exception("the end of a write was not taken")


def open_writer(files: SegmentFiles, clock_s: Callable[[], float]) -> DiskWriter:
    """The quickest writer for these files."""
    library = native_library() if syncs_by_system(files.io) else None
    return ThreadedWriter(files, clock_s) if library is None else NativeWriter(files, library, clock_s)


def syncs_by_system(io: DiskIo) -> bool:
    """Whether all that a write does is the system's own."""
    return makes_system_calls(io) and type(io).fdatasync is SystemDiskIo.fdatasync


def _error(number: int) -> Exception:
    if number == SYNC_FAILED:
        return SyncFailed("an earlier sync of the segment failed")
    if number > SYNC_FAILED:
        return SyncFailed(os.strerror(number - SYNC_FAILED))
    return OSError(number or errno.EIO, os.strerror(number or errno.EIO))

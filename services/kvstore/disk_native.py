"""Reads and writes of blocks in threads that never take the interpreter's lock (`csrc/disk_io.c`).

A read and its checksum are one job, handed in and taken back in batches: the event loop pays a few
microseconds a block, and four readers of single blocks keep a disk as busy as four threads would. Compiled
with the system's C compiler at first use; where there is none, threads of the interpreter do the same work.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from libs.common.errors import DataCorrupt, Unavailable
from libs.common.native_build import compiled, find_compiler
from services.kvstore.disk_files import BlockRead, SegmentFiles, SlotWrite, follows
from services.kvstore.disk_io import makes_system_calls
from services.kvstore.disk_queue import Ended, OnEnd
from services.kvstore.disk_reads import READ_THREADS, BlockReader, place, threaded_reader

log = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-pthread", "-fPIC", "-shared")
FOLLOWED, WRITES = 1, 2
MISMATCH = 1
PART = struct.Struct("<QiIqQQQ16s")
_ENDED = struct.Struct("<Qq")
_TAKEN_AT_ONCE = 256


class NativePool:
    """Threads of the library. Calls but `run` are for one thread, the event loop's."""

    def __init__(self, library: _Library, *, n_threads: int) -> None:
        self._library = library
        self.event_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pool = library.calls.kv_pool_open(n_threads, self.event_fd, library.hash)
        if not self._pool:
            os.close(self.event_fd)
            raise MemoryError("no memory for the disk's threads")
        self._taken = ctypes.create_string_buffer(_ENDED.size * _TAKEN_AT_ONCE)

    def add(self, parts: bytes | bytearray, n_parts: int, *, n_unended: int) -> None:
        """Hand in parts. `n_unended`: all that were and that `take` did not give yet."""
        if not self._pool:
            raise Unavailable("the disk is closed")
        if not self._library.calls.kv_pool_add(self._pool, bytes(parts), n_parts, n_unended):
            raise MemoryError("no memory for the disk's queue")

    def take(self) -> list[tuple[int, int]]:
        """(id, result) of all that ended since."""
        found: list[tuple[int, int]] = []
        while self._pool and (n := self._library.calls.kv_pool_take(self._pool, self._taken, _TAKEN_AT_ONCE)):
            found += _ENDED.iter_unpack(self._taken.raw[: n * _ENDED.size])
        return found

    def run(self, parts: Sequence[SlotWrite]) -> list[OSError | None]:
        """Write all parts, and wait; what went wrong with which. For threads."""
        packed = b"".join(
            PART.pack(index, part.fd, WRITES | part.followed, part.offset, part.n_bytes, part.address, 0, b"")
            for index, part in enumerate(parts)
        )
        if not parts or not self._pool:
            return [OSError(errno.EBADF, "the disk is closed")] * len(parts)
        results = ctypes.create_string_buffer(_ENDED.size * len(parts))
        if not self._library.waiting_calls.kv_pool_run(self._pool, packed, len(parts), results):
            raise MemoryError("no memory for the disk's queue")
        return [
            None if not result else OSError(-result, os.strerror(-result))
            for _, result in _ENDED.iter_unpack(results.raw)
        ]

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

    def __init__(self, files: SegmentFiles, library: _Library, clock_s: Callable[[], float]) -> None:
        self._files = files
        self._pool = NativePool(library, n_threads=READ_THREADS)
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
        order = range(len(items))
        if len(items) > 1:
            order = sorted(order, key=lambda at: place(items[at]))  # type: ignore[assignment]
        packed, n_run = bytearray(), 1
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
                int(followed),
                offset,
                slot.slot_bytes,
                item.address,
                block.n_bytes,
                block.checksum,
            )
            self._tickets[self._next] = on_end, at, item
        self._pool.add(packed, len(items), n_unended=len(self._tickets))

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
        if loop is not self._loop:
            self._loop = loop
            loop.add_reader(self._pool.event_fd, self._deliver)

    def _deliver(self) -> None:
        try:
            os.eventfd_read(self._pool.event_fd)
        except BlockingIOError:
            pass  # taken already
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


class _Hash(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))


def open_writer(files: SegmentFiles, *, n_threads: int) -> NativePool | None:
    """A pool whose `run` writes payloads into these files; None where that is not possible."""
    library = native_library() if makes_system_calls(files.io) else None
    return None if library is None else NativePool(library, n_threads=n_threads)


@dataclass(frozen=True, slots=True)
class _Library:
    """The same functions twice: quick ones keep the interpreter's lock, those that wait let go of it."""

    calls: Any
    waiting_calls: Any
    hash: Any


@cache
def native_library() -> _Library | None:
    """The compiled library; None, after one log line, where that is not possible."""
    compiler = find_compiler()
    if compiler is None:
        log.warning("no C compiler found: disks are read and written by slower threads")
        return None
    try:
        path = compiled(compiler, SOURCE_DIR, name="kvstore", flags=FLAGS)
        calls, waiting_calls = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        # The checksum's own library: the C function behind xxhash.xxh3_128_digest.
        hash_ = ctypes.CDLL(_xxhash_path()).XXH3_128bits_dispatch
        hash_.restype = _Hash
        found = hash_(FLAGS[0].encode(), ctypes.c_size_t(len(FLAGS[0])))
        if struct.pack(">QQ", found.high, found.low) != xxhash.xxh3_128_digest(FLAGS[0].encode()):
            raise OSError("xxhash's library does not give its digests")
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.warning("disks are read and written by slower threads: %s", detail)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int
    for library in (calls, waiting_calls):
        library.kv_pool_open.restype = pointer
        library.kv_pool_open.argtypes = [number, number, pointer]
        library.kv_pool_add.argtypes = [pointer, ctypes.c_char_p, number, number]
        library.kv_pool_run.argtypes = [pointer, ctypes.c_char_p, number, pointer]
        library.kv_pool_take.argtypes = [pointer, pointer, number]
        library.kv_pool_give_up.argtypes = library.kv_pool_close.argtypes = [pointer]
        library.kv_pool_give_up.restype = library.kv_pool_close.restype = None
        library.kv_pool_oldest_ns.argtypes = [pointer]
        library.kv_pool_oldest_ns.restype = ctypes.c_int64
    return _Library(calls, waiting_calls, ctypes.cast(hash_, pointer))


def _xxhash_path() -> str:
    module: Any = xxhash._xxhash  # type: ignore[attr-defined]
    return str(module.__file__)

"""One segment file: preallocated, cut into slots, read and written slot by slot. Blocking.

A cut happens in place: one write zeroes the header table and sets the cut's generation in the superblock.
A torn cut leaves no whole superblock, and the next start removes the file.
"""

from __future__ import annotations

import errno
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from libs.common.transport.registered_memory import PageAlignedMemory
from services.kvstore.disk.segment_format import (
    HEADER_BYTES,
    BlockHeader,
    FoundHeaders,
    Superblock,
    find_headers,
    unpack_header,
    unpack_superblock,
)
from services.kvstore.disk.segments.io import DiskIo

SCAN_BYTES = 1 << 20


class SyncFailed(Exception):
    """fdatasync failed: the segment's contents are unknown from now on, even after a later success."""


class BufferPool:
    """Page-aligned buffers of SCAN_BYTES; their number is the highest concurrent use."""

    def __init__(self) -> None:
        self._idle: deque[PageAlignedMemory] = deque()
        self._lock = threading.Lock()
        self.in_use = 0

    @contextmanager
    def borrow(self) -> Iterator[PageAlignedMemory]:
        """A buffer for the duration of the `with` block."""
        with self._lock:
            self.in_use += 1
            buffer = self._idle.pop() if self._idle else None
        try:
            buffer = buffer or PageAlignedMemory(SCAN_BYTES)
            yield buffer
        finally:
            with self._lock:
                self.in_use -= 1
                if buffer is not None:
                    self._idle.append(buffer)


class SegmentFile:
    """An open segment. Several threads may read and write different slots."""

    def __init__(self, path: Path, superblock: Superblock, fd: int, io: DiskIo, pool: BufferPool) -> None:
        self.path = path
        self.superblock = superblock
        self._fd = fd
        self._io = io
        self._pool = pool
        self._sync_lock = threading.Lock()
        self._sync_state = array("i", (0, 0))  # running, failed: shared with disk_write.c

    @classmethod
    def create(cls, path: Path, superblock: Superblock, io: DiskIo, pool: BufferPool) -> SegmentFile:
        """A new, empty segment that replaces any file of that name. Raises OSError, SyncFailed.

        Removes the file on an error.
        """
        fd = io.open(path, create=True)
        try:
            io.fallocate(fd, HEADER_BYTES + superblock.segment_bytes)
            file = cls(path, superblock, fd, io, pool)
            file.cut(superblock)
            io.sync_directory(path.parent)
        except BaseException:
            io.close(fd)
            io.unlink(path)
            raise
        return file

    @classmethod
    def open(cls, path: Path, io: DiskIo, pool: BufferPool) -> SegmentFile | None:
        """An existing segment; None if its version differs or it is truncated. Raises OSError."""
        fd = io.open(path)
        try:
            with pool.borrow() as buffer:
                page = buffer.view(0, HEADER_BYTES)
                got = io.preadv(fd, [page], 0)
                superblock = unpack_superblock(page) if got == HEADER_BYTES else None
            if superblock is None or io.n_bytes(fd) != HEADER_BYTES + superblock.segment_bytes:
                io.close(fd)
                return None
        except BaseException:
            io.close(fd)
            raise
        return cls(path, superblock, fd, io, pool)

    @property
    def fd(self) -> int:
        """The descriptor, open until `close`."""
        return self._fd

    @property
    def poisoned(self) -> bool:
        """Whether a sync of the file failed."""
        return bool(self._sync_state[1])

    @property
    def sync_state_address(self) -> int:
        """Address of the sync state that the native library shares."""
        return self._sync_state.buffer_info()[0]

    def cut(self, superblock: Superblock) -> None:
        """Remove all blocks and cut the file for this superblock, synced. Raises OSError, SyncFailed."""
        with self._pool.borrow() as buffer:
            end = HEADER_BYTES * (1 + superblock.n_slots)
            for offset in range(0, end, SCAN_BYTES):
                view = buffer.view(0, min(SCAN_BYTES, end - offset))
                view[:] = bytes(len(view))
                if not offset:
                    view[:HEADER_BYTES] = superblock.pack()
                self._write_all([view], offset)
        self.sync()
        self.superblock = superblock  # from here on writers use the file, and sync it themselves

    def scan(self) -> FoundHeaders:
        """All whole headers of this cut. Raises OSError."""
        n_slots = self.superblock.n_slots
        parts = []
        with self._pool.borrow() as buffer:
            step = SCAN_BYTES // HEADER_BYTES
            for first in range(0, n_slots, step):
                view = buffer.view(0, min(step, n_slots - first) * HEADER_BYTES)
                got = self._io.preadv(self._fd, [view], self.superblock.header_offset(first))
                if got != len(view):
                    raise OSError(errno.EIO, f"read {got} of {len(view)} bytes")
                parts.append(find_headers(view, self.superblock, first))
        return FoundHeaders.joined(parts)

    def read(self, index: int, payloads: Sequence[memoryview]) -> None:
        """Read the payloads (each of slot size) from slot `index` on. Raises OSError."""
        got = self._io.preadv(self._fd, payloads, self.superblock.payload_offset(index))
        if got != sum(len(payload) for payload in payloads):
            raise OSError(errno.EIO, f"read {got} of {len(payloads)} payloads' bytes")

    def read_part(self, index: int, start: int, part: memoryview) -> None:
        """Read `part` of the payload of slot `index`, from its byte `start` on. Raises OSError."""
        got = self._io.preadv(self._fd, [part], self.superblock.payload_offset(index) + start)
        if got != len(part):
            raise OSError(errno.EIO, f"read {got} of {len(part)} bytes")

    def read_header(self, index: int) -> BlockHeader | None:
        """The slot's header; None if it is not whole. Raises OSError."""
        with self._pool.borrow() as buffer:
            page = buffer.view(0, HEADER_BYTES)
            got = self._io.preadv(self._fd, [page], self.superblock.header_offset(index))
            return unpack_header(page) if got == HEADER_BYTES else None

    def write(self, index: int, payloads: Sequence[memoryview]) -> None:
        """Write payloads (each of slot size) from slot `index` on, unsynced."""
        self._write_all(payloads, self.superblock.payload_offset(index))

    def write_headers(self, index: int, headers: Sequence[bytes]) -> None:
        """Replace the headers from slot `index` on, unsynced; b"" erases one."""
        step = SCAN_BYTES // HEADER_BYTES
        with self._pool.borrow() as buffer:
            for start in range(0, len(headers), step):
                part = headers[start : start + step]
                pages = buffer.view(0, len(part) * HEADER_BYTES)
                pages[:] = b"".join(header.ljust(HEADER_BYTES, b"\0") for header in part)
                self._write_all([pages], self.superblock.header_offset(index + start))

    def sync(self) -> None:
        """Make all completed writes durable. Raises SyncFailed, now and on every call after a failure.

        Syncs of a file exclude each other: the kernel reports a failure once, and no other sync may miss it.
        """
        with self._sync_lock:
            if self.poisoned:
                raise SyncFailed(f"an earlier sync of {self.path.name} failed")
            try:
                self._io.fdatasync(self._fd)
            except OSError as error:
                self._sync_state[1] = 1
                raise SyncFailed(str(error)) from error

    def close(self) -> None:
        """Close the descriptor. No call may use the file any more."""
        self._io.close(self._fd)

    def _write_all(self, data: Sequence[memoryview], offset: int) -> None:
        expected = sum(len(each) for each in data)
        written = self._io.pwritev(self._fd, data, offset)
        if written != expected:
            raise OSError(errno.EIO, f"wrote {written} of {expected} bytes")

"""One segment file: created whole and preallocated, then read and written slot by slot. Blocking.

Direct I/O where the filesystem takes it (steady latency, no copy in the page cache), else buffered.
Every buffer is page-aligned and page-rounded for that reason.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from libs.common.registered_memory import PageAlignedMemory
from services.kvstore.disk_format import (
    HEADER_BYTES,
    BlockHeader,
    Superblock,
    unpack_header,
    unpack_superblock,
)

log = logging.getLogger(__name__)

# Aligned room for headers, one in use for each running call.
_page_pool: deque[PageAlignedMemory] = deque()


class SyncFailed(Exception):
    """fdatasync failed: what the segment holds is unknown from now on, also after a later success."""


class DiskIo(Protocol):
    """The system calls of a segment file; tests bring failing ones."""

    def fallocate(self, fd: int, n_bytes: int) -> None: ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...

    def fdatasync(self, fd: int) -> None: ...


class SystemDiskIo:
    """The real system calls."""

    def fallocate(self, fd: int, n_bytes: int) -> None:
        os.posix_fallocate(fd, 0, n_bytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)


class SegmentFile:
    """An open segment. Slots may be read and written from several threads, one thread a slot."""

    def __init__(self, path: Path, superblock: Superblock, fd: int, io: DiskIo) -> None:
        self.path = path
        self.superblock = superblock
        self._fd = fd
        self._io = io

    @classmethod
    def create(cls, path: Path, superblock: Superblock, io: DiskIo) -> SegmentFile:
        """A new, empty segment in the place of whatever was there. Raises OSError, nothing left behind."""
        draft = path.with_suffix(".new")
        fd = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            io.fallocate(fd, HEADER_BYTES + superblock.segment_bytes)
            page = memoryview(superblock.pack())
            if io.pwritev(fd, [page], 0) != HEADER_BYTES:
                raise OSError(errno.EIO, "short write")
            os.fsync(fd)
            os.rename(draft, path)
            _sync_directory(path.parent)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return cls(path, superblock, _open_direct(path), io)

    @classmethod
    def open(cls, path: Path, io: DiskIo) -> SegmentFile | None:
        """An existing segment; None when it is not one of this version, or truncated."""
        superblock = unpack_superblock(_first_page(path))
        if superblock is None or path.stat().st_size != HEADER_BYTES + superblock.segment_bytes:
            return None
        return cls(path, superblock, _open_direct(path), io)

    def headers(self, n_slots: int) -> Iterator[BlockHeader | None]:
        """The header of each slot, None where there is no whole one."""
        page = _borrow_page()
        try:
            for index in range(n_slots):
                view = page.view(0, HEADER_BYTES)
                got = self._io.preadv(self._fd, [view], self._offset(index))
                yield unpack_header(view) if got == HEADER_BYTES else None
        finally:
            _page_pool.append(page)

    def read(self, index: int, payload: memoryview) -> BlockHeader | None:
        """Fill `payload` (page-rounded) from the slot; its header, None when that is not whole.

        The caller compares the header and its digest with what it expects. Raises OSError.
        """
        page = _borrow_page()
        try:
            view = page.view(0, HEADER_BYTES)
            got = self._io.preadv(self._fd, [view, payload], self._offset(index))
            return unpack_header(view) if got == HEADER_BYTES + len(payload) else None
        finally:
            _page_pool.append(page)

    def write(self, index: int, header: bytes, payload: memoryview) -> None:
        """Write payload (page-rounded), then the header that publishes it, each synced.

        Raises OSError, SyncFailed.
        """
        self._put(payload, self._offset(index) + HEADER_BYTES)
        self.write_header(index, header)

    def write_header(self, index: int, header: bytes) -> None:
        """Replace the slot's header. Raises OSError, SyncFailed."""
        page = _borrow_page()
        try:
            view = page.view(0, HEADER_BYTES)
            view[:] = header
            self._put(view, self._offset(index))
        finally:
            _page_pool.append(page)

    def close(self) -> None:
        """Close the descriptor. Nothing may run on the file any more."""
        os.close(self._fd)

    def _put(self, data: memoryview, offset: int) -> None:
        written = self._io.pwritev(self._fd, [data], offset)
        if written != len(data):
            raise OSError(errno.EIO, f"wrote {written} of {len(data)} bytes")
        try:
            self._io.fdatasync(self._fd)
        except OSError as error:
            raise SyncFailed(str(error)) from error

    def _offset(self, index: int) -> int:
        return HEADER_BYTES + index * (HEADER_BYTES + self.superblock.slot_bytes)


def _borrow_page() -> PageAlignedMemory:
    try:
        return _page_pool.pop()
    except IndexError:
        return PageAlignedMemory(HEADER_BYTES)


def _open_direct(path: Path) -> int:
    """The file for direct I/O, or buffered where the filesystem refuses that."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)
    probe = PageAlignedMemory(HEADER_BYTES)
    try:
        os.preadv(fd, [probe.view(0, HEADER_BYTES)], 0)
    except OSError as error:
        os.close(fd)
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags)
    return fd


def _first_page(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEADER_BYTES)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

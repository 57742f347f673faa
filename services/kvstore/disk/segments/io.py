"""The system calls of the disk tier. Every disk operation passes through a `DiskIo`.

Files use direct I/O where the filesystem supports it (steady latency, no copy in the page cache), else they
are buffered. All buffers are therefore page-aligned and page-rounded. Tests use disks that fail, hang, or
record each operation.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from libs.common.transport.registered_memory import PageAlignedMemory
from slipstream.errors import FailedPrecondition

_SEGMENT = re.compile(r"segment-\d{6}")
_PROBE_BYTES = 4096
_LOCK_POLL_S = 0.05
# Errors of a wrong configuration; all others are the disk's and may be transient.
CONFIG_ERRNOS = frozenset(
    (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP)
)


class DiskIo(Protocol):
    """One disk. All calls block and raise OSError. Descriptors are valid for this object only."""

    direct: bool  # whether files use direct I/O; known after the first open

    def lock_directory(self, directory: Path) -> int: ...

    def segments(self, directory: Path) -> list[Path]: ...

    def open(self, path: Path, *, create: bool = False) -> int: ...

    def n_bytes(self, fd: int) -> int: ...

    def fallocate(self, fd: int, n_bytes: int) -> None: ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int: ...

    def fdatasync(self, fd: int) -> None: ...

    def sync_directory(self, directory: Path) -> None: ...

    def unlink(self, path: Path) -> None: ...

    def close(self, fd: int) -> None: ...


def uses_system_reads_and_writes(io: DiskIo) -> bool:
    """Whether the disk uses the system's `preadv` and `pwritev` on system descriptors."""
    kind = type(io)
    return (
        isinstance(io, SystemDiskIo)
        and kind.preadv is SystemDiskIo.preadv
        and kind.pwritev is SystemDiskIo.pwritev
    )


class SystemDiskIo:
    """The operating system's calls."""

    direct: bool = True
    # A killed node's process may still be ending when the next one starts, as after the deletion of a pod.
    # Less than HANGS_AFTER_S of `opening.py`: a second node of one directory is refused at its start.
    lock_wait_s: float = 1.5

    def lock_directory(self, directory: Path) -> int:
        """Create the directory and lock it for this process, until the descriptor is closed.

        Waits `lock_wait_s` for a process that has it. Raises FailedPrecondition when that one stays, or when
        this process may not write to it, OSError when the disk does not answer.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
            fd = os.open(directory / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno not in CONFIG_ERRNOS:
                raise
            raise FailedPrecondition(f"{directory} is not writable: {error}") from None
        give_up_s = time.monotonic() + self.lock_wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except OSError as error:
                if error.errno == errno.EWOULDBLOCK and time.monotonic() < give_up_s:
                    time.sleep(_LOCK_POLL_S)
                    continue
                os.close(fd)
                if error.errno != errno.EWOULDBLOCK:
                    raise FailedPrecondition(f"{directory} cannot be locked: {error}") from None
                raise FailedPrecondition(f"{directory} is in use by another process") from None

    def segments(self, directory: Path) -> list[Path]:
        """The segment files, sorted."""
        return sorted(path for path in directory.iterdir() if _SEGMENT.fullmatch(path.name))

    def open(self, path: Path, *, create: bool = False) -> int:
        """A descriptor for direct I/O, or a buffered one where the filesystem refuses it."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0)
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            return os.open(path, flags, 0o600)
        page = PageAlignedMemory(_PROBE_BYTES)  # a view does not keep its memory alive
        try:
            os.preadv(fd, [page.view(0, _PROBE_BYTES)], 0)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            return os.open(path, flags & ~os.O_TRUNC, 0o600)
        return fd

    def n_bytes(self, fd: int) -> int:
        """The file's size."""
        return os.fstat(fd).st_size

    def fallocate(self, fd: int, n_bytes: int) -> None:
        """Give the file that size with its blocks reserved, so that ENOSPC occurs here and not later."""
        os.posix_fallocate(fd, 0, n_bytes)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def sync_directory(self, directory: Path) -> None:
        """Make the creation and removal of names durable."""
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def close(self, fd: int) -> None:
        os.close(fd)

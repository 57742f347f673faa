"""Reads a small file that a flag names, as one of a secret. A pipe or a device has no end, and may block."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from slipstream.bounds import MAX_SECRET_FILE_BYTES


def read_bounded_text(path: Path, *, max_bytes: int = MAX_SECRET_FILE_BYTES) -> str:
    """The text of a regular file. Raises ValueError that names the file, and the line that is not UTF-8."""
    try:
        data = read_bounded(path, max_bytes=max_bytes)
    except OSError as error:
        can = "" if error.errno == errno.EFBIG else "cannot be read: "
        raise ValueError(f"{path}: {can}{error.strerror}") from None
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: is not UTF-8") from None


def read_bounded(path: Path, *, max_bytes: int = MAX_SECRET_FILE_BYTES) -> bytes:
    """The bytes of a regular file, also behind a link. Raises OSError with its reason, and never waits."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes} bytes", str(path))
    return data


def open_regular(path: Path) -> BinaryIO:
    """A regular file to read, also behind a link. Raises OSError with its reason, and never waits."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe without a writer blocks
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return os.fdopen(descriptor, "rb")

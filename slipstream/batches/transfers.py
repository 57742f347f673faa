"""Content of files: what an upload reads, what a download repeats, and where it is written."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.errors import InvalidArgument
from slipstream.v1 import batches_pb2

PIECE_BYTES = 1 << 20
# What a client may upload: a path, the content itself, or a file that is open for reading bytes.
Content = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO
_DEFAULT_NAME = "requests.jsonl"


class UploadSource:
    """The content of an upload, read a piece at a time. Each try reads it from its begin."""

    def __init__(self, content: Content, *, name: str = "", ttl_ms: int = 0) -> None:
        """An open file is read from where it stands. Raises InvalidArgument for one without a size."""
        self._file, self._is_own = _opened(content)
        self._name = name or _name_of(content)
        self._ttl_ms = ttl_ms
        self._failure: Exception | None = None
        try:
            self._begin = self._file.tell()
            self._n_bytes = max(self._file.seek(0, os.SEEK_END) - self._begin, 0)
        except (OSError, AttributeError, ValueError):
            self.close()
            reason = "must have a size: a path, bytes, or a binary file that can seek"
            raise InvalidArgument("content", reason) from None

    def messages(self) -> Iterator[batches_pb2.UploadFileRequest]:
        """The header, then the pieces. They end early where reading fails; `check` raises it."""
        yield batches_pb2.UploadFileRequest(
            header=batches_pb2.FileHeader(name=self._name, n_bytes=self._n_bytes, ttl_ms=self._ttl_ms)
        )
        try:
            self._file.seek(self._begin)
            n_left = self._n_bytes
            while n_left and (piece := self._file.read(min(n_left, PIECE_BYTES))):
                if isinstance(piece, str):
                    raise InvalidArgument("content", "must be a file of bytes, not of text")
                n_left -= len(piece)
                yield batches_pb2.UploadFileRequest(content=piece)
        except Exception as error:  # gRPC's thread may read, and drops the error: `check` raises it
            self._failure = error

    def check(self) -> None:
        """Raises what ended the messages early."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Close a file that this opened. Idempotent."""
        if self._is_own:
            self._file.close()


def _opened(content: Content) -> tuple[Any, bool]:
    if isinstance(content, bytes | bytearray | memoryview):
        return io.BytesIO(content), True
    if not isinstance(content, str | os.PathLike):
        return content, False
    try:
        return open(content, "rb"), True
    except OSError as error:
        raise InvalidArgument("content", f"cannot be read: {error}") from None


def _name_of(content: Content) -> str:
    named = getattr(content, "name", None) if not isinstance(content, str | os.PathLike) else content
    return os.path.basename(named) if isinstance(named, str | os.PathLike) else _DEFAULT_NAME


class FreshContent:
    """The pieces of a download that begins again after a loss, without what came before."""

    def __init__(self) -> None:
        self._n_given = self._n_tries = self._n_arrived = 0

    def strip(self, n_tries: int, piece: bytes) -> bytes:
        """What is new of the next piece of a try."""
        if n_tries != self._n_tries:
            self._n_tries, self._n_arrived = n_tries, 0
        fresh = piece[max(self._n_given - self._n_arrived, 0) :]
        self._n_arrived += len(piece)
        self._n_given += len(fresh)
        return fresh


class DownloadTarget:
    """A file that appears under its path once it is whole, and replaces one that is there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises InvalidArgument where nothing can be written."""
        self._path = Path(os.path.realpath(path))
        if self._path.exists() and not self._path.is_file():
            raise InvalidArgument("to", f"{path} is no file")
        self._partial = self._path.with_name(f".{secrets.token_hex(8)}.part")
        try:
            self._file = self._partial.open("xb")
        except OSError as error:
            raise InvalidArgument("to", f"{path} cannot be written: {error.strerror}") from None

    def write(self, piece: bytes) -> None:
        """Add a piece."""
        self._file.write(piece)

    def finish(self) -> None:
        """Put the whole file in its place."""
        self._file.close()
        self._partial.replace(self._path)

    def discard(self) -> None:
        """Leave nothing of a file that is not finished."""
        with contextlib.suppress(OSError):  # of what was not written yet
            self._file.close()
        self._partial.unlink(missing_ok=True)

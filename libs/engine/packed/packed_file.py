"""The format of a file of packed weights: tensors, then their index, then a trailer.

    tensors    each at a multiple of 64 bytes
    index      JSON of `PackedIndex`, with a checksum of each piece of the tensors
    trailer    magic, length of the index, checksum of the index

A file is complete when it has its name: it is written under another name, and then renamed. So it needs no
fsync: what a power cut leaves of it fails the checksums. Checksums detect damage, but no forgery; the owner
of the file does that.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import stat
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from libs.common.checksum import KvChecksum
from slipstream.errors import FailedPrecondition

PIECE_BYTES = 4 << 20
ALIGNED = 64
_MAGIC = b"SLIPPACK"
_TRAILER = struct.Struct("<8sQ16s")
_MAX_INDEX_BYTES = 256 << 20  # a million tensors; a damaged length must not take the memory of the host
_N_THREADS = 8  # pieces in flight: a drive needs several
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int32": torch.int32}
# With a key the checksum runs in C functions, which release the interpreter's lock.
_CHECKSUM = KvChecksum(b"packed weights")


class PackedFileUnusable(FailedPrecondition):
    """A file of packed weights is damaged, incomplete, of other weights or of another owner."""


class PackedTensor(msgspec.Struct, frozen=True):
    """Where one tensor is."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


class PackedMatrix(msgspec.Struct, frozen=True):
    """The tensors of `Panels`."""

    rows: int
    cols: int
    data: PackedTensor
    scale: PackedTensor | None = None
    group: int = 0


class PackedIndex(msgspec.Struct, frozen=True):
    """The contents of a file. `key` states of which weights, for which kernels (`packed_key`)."""

    key: str
    n_bytes: int  # of the tensors
    pieces: tuple[str, ...]  # a checksum each, in hex
    tensors: dict[str, PackedTensor]
    matrices: dict[str, PackedMatrix]


@dataclass(frozen=True, slots=True)
class OpenPackedFile:
    """A file that is mapped and checked."""

    index: PackedIndex
    memory: mmap.mmap

    def tensor(self, stored: PackedTensor) -> torch.Tensor:
        flat = torch.frombuffer(
            self.memory, dtype=_DTYPES[stored.dtype], count=math.prod(stored.shape), offset=stored.offset
        )
        return flat.view(*stored.shape)


def tensor_dtype(dtype: torch.dtype) -> str:
    """The name of the dtype in a file."""
    return str(dtype).removeprefix("torch.")


def checksums(address: int, n_bytes: int, before: Callable[[int, int], object] | None = None) -> list[str]:
    """The checksum of each piece of a memory. `before` is called with the offset and size of each."""

    def piece(at: int) -> str:
        size = min(PIECE_BYTES, n_bytes - at)
        if before is not None:
            before(at, size)
        return _CHECKSUM.at(address + at, size).hex()

    with ThreadPoolExecutor(_N_THREADS, thread_name_prefix="packed") as pool:
        return list(pool.map(piece, range(0, n_bytes, PIECE_BYTES)))


def append_index(descriptor: int, index: PackedIndex) -> None:
    """Write the index and the trailer behind the tensors, and cut the file there. Raises OSError."""
    body = msgspec.json.encode(index)
    end = body + _TRAILER.pack(_MAGIC, len(body), _CHECKSUM.of(body))
    os.ftruncate(descriptor, index.n_bytes)
    done = 0
    while done < len(end):
        done += os.pwrite(descriptor, end[done:], index.n_bytes + done)


def open_packed_file(path: Path, key: Callable[[], str], progress: Callable[[int], None]) -> OpenPackedFile:
    """Map a file and check every byte. `progress` is called, by any thread, with bytes that were checked.

    Raises PackedFileUnusable, and FileNotFoundError when there is none. Its pages are those of the page
    cache, which all processes share; they stay when the file is removed.
    """
    # Without O_NONBLOCK a named pipe in place of the file would hold the process here.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        index = _read_index(descriptor)
        if index.key != key():
            raise PackedFileUnusable("holds other weights, or is for other kernels")
        # Private and writable for torch, which knows no memory that only can be read; then only readable.
        memory = mmap.mmap(descriptor, index.n_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        protect(address, index.n_bytes)

        def read_ahead(at: int, size: int) -> None:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, at, size, os.POSIX_FADV_WILLNEED)
            progress(size)

        if tuple(checksums(address, index.n_bytes, read_ahead)) != index.pieces:
            raise PackedFileUnusable("is damaged: a checksum differs")
        return OpenPackedFile(index, memory)
    finally:
        os.close(descriptor)


def protect(address: int, n_bytes: int) -> None:
    """Let the process read mapped pages only: a stray write would change the weights of every process."""
    ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(n_bytes), 1)


def _read_index(descriptor: int) -> PackedIndex:
    n_bytes = _checked_size(descriptor)
    trailer = os.pread(descriptor, _TRAILER.size, max(n_bytes - _TRAILER.size, 0))
    if len(trailer) < _TRAILER.size or not trailer.startswith(_MAGIC):
        raise PackedFileUnusable("is incomplete")
    _, length, checksum = _TRAILER.unpack(trailer)
    begin = n_bytes - _TRAILER.size - length
    body = os.pread(descriptor, length, begin) if begin > 0 and length <= _MAX_INDEX_BYTES else b""
    if not body or len(body) != length or _CHECKSUM.of(body) != checksum:
        raise PackedFileUnusable("is damaged: its index")
    try:
        index = msgspec.json.decode(body, type=PackedIndex)
    except (msgspec.DecodeError, RecursionError):
        raise PackedFileUnusable("has the index of another version") from None
    if index.n_bytes != begin:
        raise PackedFileUnusable("is damaged: its size")
    for tensor in _tensors_of(index):
        if not _is_inside(tensor, begin):
            raise PackedFileUnusable("is damaged: a tensor is not inside")
    return index


def _checked_size(descriptor: int) -> int:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise PackedFileUnusable("is no regular file")
    if found.st_uid not in (os.geteuid(), 0):
        raise PackedFileUnusable("belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):  # mapped pages change with the file, unchecked
        raise PackedFileUnusable("may be written by other users")
    return found.st_size


def _tensors_of(index: PackedIndex) -> Iterator[PackedTensor]:
    yield from index.tensors.values()
    for matrix in index.matrices.values():
        yield matrix.data
        if matrix.scale is not None:
            yield matrix.scale


def _is_inside(tensor: PackedTensor, n_bytes: int) -> bool:
    return (
        tensor.dtype in _DTYPES
        and min(tensor.shape, default=1) >= 0
        and tensor.offset >= 0
        and tensor.offset % ALIGNED == 0
        and tensor.offset + tensor.n_bytes <= n_bytes
    )

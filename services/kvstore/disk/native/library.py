"""The native library that reads and writes blocks without the interpreter's lock (`csrc`).

The wheel's build compiles it (`server/native_build.py`). The checksum is xxhash's own C function from
the library that Python uses; a self-test at start compares their digests.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from slipstream.errors import FailedPrecondition

log = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_disk_io.so")
ENDED = struct.Struct("<Qq")  # id, result


class _Hash(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))


class _Hashes(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("whole", "create", "free", "reset", "update", "digest")
    )

    @classmethod
    def of(cls, library: Any) -> _Hashes:
        """xxhash's functions, the processor-specific ones where they exist.

        Raises AttributeError for a missing function, OSError if the digests differ from Python's.
        """
        whole = _dispatched(library, "XXH3_128bits")
        create, free = library.XXH3_createState, library.XXH3_freeState
        reset, update = library.XXH3_128bits_reset, _dispatched(library, "XXH3_128bits_update")
        digest = library.XXH3_128bits_digest
        whole.restype = digest.restype = _Hash
        create.restype = ctypes.c_void_p
        free.argtypes = reset.argtypes = digest.argtypes = [ctypes.c_void_p]
        update.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
        data, at = bytes(range(251)) * 5, 700
        state = create()
        reset(state)
        update(state, data[:at], at)
        update(state, data[at:], len(data) - at)
        found = digest(state), whole(data, ctypes.c_size_t(len(data)))
        free(state)
        if any(struct.pack(">QQ", sum_.high, sum_.low) != xxhash.xxh3_128_digest(data) for sum_ in found):
            raise OSError("xxhash's library does not give its digests")
        functions = (whole, create, free, reset, update, digest)
        return cls(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))


def _dispatched(library: Any, name: str) -> Any:
    """The function that dispatches by processor, where the library has one."""
    return getattr(library, f"{name}_dispatch", None) or getattr(library, name)


@dataclass(frozen=True, slots=True)
class Library:
    """The same functions twice: short calls keep the interpreter's lock, `waiting_calls` release it."""

    calls: Any
    waiting_calls: Any
    hash: Any  # of a whole buffer
    hashes: Any  # `hash` and the incremental form, as in disk_io.h


@cache
def native_library() -> Library | None:
    """The compiled library; None, after one log line, where xxhash's library does not fit it. Raises
    FailedPrecondition where the installation lacks the compiled library."""
    if not LIBRARY.exists():
        raise FailedPrecondition(
            f"the compiled disk library is missing ({LIBRARY}): reinstall slipstream-server, or run "
            "`make native` in a checkout"
        )
    try:
        calls, waiting_calls = ctypes.PyDLL(str(LIBRARY)), ctypes.CDLL(str(LIBRARY))
        # The checksum's own library: the C function behind xxhash.xxh3_128_digest.
        hashes = _Hashes.of(ctypes.CDLL(_xxhash_path()))
    except (OSError, AttributeError) as error:
        log.warning("disks are read and written by slower threads: %s", error)
        return None
    _declare(calls)
    _declare(waiting_calls)
    return Library(calls, waiting_calls, ctypes.c_void_p(hashes.whole), hashes)


def _declare(library: Any) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.kv_pool_open.restype = library.kv_writer_open.restype = pointer
    library.kv_pool_open.argtypes = [number, number, ctypes.POINTER(_Hashes), number]
    library.kv_pool_has_ring.argtypes = [pointer]
    library.kv_pool_add.argtypes = [pointer, ctypes.c_char_p, number, number]
    library.kv_pool_cancel.restype = None
    library.kv_pool_cancel.argtypes = [pointer]
    library.kv_writer_open.argtypes = [number, number, pointer, pointer, pointer]
    library.kv_writer_add.argtypes = [pointer, ctypes.c_char_p, number]
    for take in (library.kv_pool_poll, library.kv_writer_poll):
        take.argtypes = [pointer, pointer, number]
    for close in (library.kv_pool_close, library.kv_writer_close):
        close.restype, close.argtypes = None, [pointer]
    for oldest in (library.kv_pool_oldest_ns, library.kv_writer_oldest_ns):
        oldest.restype, oldest.argtypes = ctypes.c_int64, [pointer]


def _xxhash_path() -> str:
    module: Any = xxhash._xxhash  # type: ignore[attr-defined]
    return str(module.__file__)

"""The compiled library that reads and writes blocks without the interpreter's lock (`csrc`).

Compiled with the system's C compiler at first use. The checksum is xxhash's own C function, taken from the
library that Python uses and tried at start.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import xxhash

from libs.common.runtime.native_build import compiled, find_compiler

log = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-pthread", "-fPIC", "-shared")
ENDED = struct.Struct("<Qq")  # id, result


class _Hash(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))


class _Hashes(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("whole", "create", "free", "reset", "update", "digest")
    )

    @classmethod
    def of(cls, library: Any) -> _Hashes:
        """xxhash's functions, for this processor where there are such. Raises AttributeError where one is not
        there, OSError where they do not give the digests that Python has."""
        whole = _best(library, "XXH3_128bits")
        create, free = library.XXH3_createState, library.XXH3_freeState
        reset, update = library.XXH3_128bits_reset, _best(library, "XXH3_128bits_update")
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


def _best(library: Any, name: str) -> Any:
    """The function that chooses by the processor, where the library has one."""
    return getattr(library, f"{name}_dispatch", None) or getattr(library, name)


@dataclass(frozen=True, slots=True)
class Library:
    """The same functions twice: quick ones keep the interpreter's lock, those that wait let go of it."""

    calls: Any
    waiting_calls: Any
    hash: Any  # of a whole
    hashes: Any  # `hash` and those of a whole that comes in pieces, as disk_io.h has them


@cache
def native_library() -> Library | None:
    """The compiled library; None, after one log line, where that is not possible."""
    compiler = find_compiler()
    if compiler is None:
        log.warning("no C compiler found: disks are read and written by slower threads")
        return None
    try:
        path = compiled(compiler, SOURCE_DIR, name="kvstore", flags=FLAGS)
        calls, waiting_calls = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        # The checksum's own library: the C function behind xxhash.xxh3_128_digest.
        hashes = _Hashes.of(ctypes.CDLL(_xxhash_path()))
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.warning("disks are read and written by slower threads: %s", detail)
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
    library.kv_pool_give_up.restype = None
    library.kv_pool_give_up.argtypes = [pointer]
    library.kv_writer_open.argtypes = [number, number, pointer, pointer, pointer]
    library.kv_writer_add.argtypes = [pointer, ctypes.c_char_p, number]
    for take in (library.kv_pool_take, library.kv_writer_take):
        take.argtypes = [pointer, pointer, number]
    for close in (library.kv_pool_close, library.kv_writer_close):
        close.restype, close.argtypes = None, [pointer]
    for oldest in (library.kv_pool_oldest_ns, library.kv_writer_oldest_ns):
        oldest.restype, oldest.argtypes = ctypes.c_int64, [pointer]


def _xxhash_path() -> str:
    module: Any = xxhash._xxhash  # type: ignore[attr-defined]
    return str(module.__file__)

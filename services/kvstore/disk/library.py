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

from libs.common.native_build import compiled, find_compiler

log = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "csrc"
FLAGS = ("-O3", "-pthread", "-fPIC", "-shared")
ENDED = struct.Struct("<Qq")  # id, result


class _Hash(ctypes.Structure):
    _fields_ = (("low", ctypes.c_uint64), ("high", ctypes.c_uint64))


@dataclass(frozen=True, slots=True)
class Library:
    """The same functions twice: quick ones keep the interpreter's lock, those that wait let go of it."""

    calls: Any
    waiting_calls: Any
    hash: Any


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
        hash_ = ctypes.CDLL(_xxhash_path()).XXH3_128bits_dispatch
        hash_.restype = _Hash
        found = hash_(FLAGS[0].encode(), ctypes.c_size_t(len(FLAGS[0])))
        if struct.pack(">QQ", found.high, found.low) != xxhash.xxh3_128_digest(FLAGS[0].encode()):
            raise OSError("xxhash's library does not give its digests")
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        log.warning("disks are read and written by slower threads: %s", detail)
        return None
    _declare(calls)
    _declare(waiting_calls)
    return Library(calls, waiting_calls, ctypes.cast(hash_, ctypes.c_void_p))


def _declare(library: Any) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.kv_pool_open.restype = library.kv_writer_open.restype = pointer
    library.kv_pool_open.argtypes = [number, number, pointer, number]
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

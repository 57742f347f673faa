"""The native library that reads and writes blocks without the interpreter's lock (`csrc`).

The wheel's build compiles it (`server/native_build.py`). The checksum is xxhash's own C function
(`libs/common/xxhash_library.py`).
"""

from __future__ import annotations

import ctypes
import logging
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from libs.common.xxhash_library import Xxh3, address_of, xxh3
from slipstream.errors import FailedPrecondition

log = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_disk_io.so")
ENDED = struct.Struct("<Qq")  # id, result


class _Hashes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("whole", "create", "free", "reset", "update", "digest")),
        ("secret", ctypes.c_char_p),
        ("secret_bytes", ctypes.c_size_t),
    )

    @classmethod
    def of(cls, calls: Xxh3, secret: bytes) -> _Hashes:
        """The functions under this secret; empty means xxh3's own."""
        functions = calls.whole, calls.create, calls.free, calls.reset, calls.update, calls.digest
        used = secret or calls.default_secret
        return cls(*map(address_of, functions), used, len(used))


@dataclass(frozen=True, slots=True)
class DiskLibrary:
    """The C functions, loaded twice: short calls keep the interpreter's lock, `waiting_calls` release it."""

    calls: Any
    waiting_calls: Any
    xxh3: Xxh3

    @property
    def hash(self) -> Any:
        """The plain checksum of a whole buffer."""
        return ctypes.c_void_p(address_of(self.xxh3.plain))

    def hashes(self, secret: bytes) -> Any:
        """The checksum under a secret, whole and incremental, as in disk_base.h."""
        return _Hashes.of(self.xxh3, secret)


@cache
def native_library() -> DiskLibrary | None:
    """The compiled library; None, after one log line, where xxhash's library does not fit it. Raises
    FailedPrecondition where the installation lacks the compiled library."""
    if not LIBRARY.exists():
        raise FailedPrecondition(
            f"the compiled disk library is missing ({LIBRARY}): reinstall slipstream-server, or run "
            "`make native` in a checkout"
        )
    try:
        calls, waiting_calls = ctypes.PyDLL(str(LIBRARY)), ctypes.CDLL(str(LIBRARY))
        found = xxh3()
    except (OSError, AttributeError) as error:
        log.warning("disks are read and written by slower threads: %s", error)
        return None
    _declare(calls)
    _declare(waiting_calls)
    return DiskLibrary(calls, waiting_calls, found)


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

"""Reads a block without one system call: `python -m tests.kvstore.disk.native.confined NUMBER FILE`."""

from __future__ import annotations

import ctypes
import os
import sys
import time

from libs.common.checksum import checksum
from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from services.kvstore.disk.native.library import native_library
from services.kvstore.disk.native.reads import DIRECT, PART, NativePool

_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_LOAD, _SKIP_ONE_IF, _RETURN = 0x20, 0x15 | 1 << 16, 0x06
_ALLOWED, _EPERM = 0x7FFF0000, 0x00050001


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.c_void_p))


def forbid(number: int) -> None:
    """Make the system call fail with EPERM in this thread and the threads it starts."""
    steps = ((_LOAD, 0), (_SKIP_ONE_IF, number), (_RETURN, _ALLOWED), (_RETURN, _EPERM))
    filters = (ctypes.c_uint64 * len(steps))(*(code | value << 32 for code, value in steps))
    program = _Program(len(steps), ctypes.addressof(filters))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or prctl(_SECCOMP, _FILTER, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "no filter of system calls")


def main() -> None:
    number, path = int(sys.argv[1]), sys.argv[2]
    library = native_library()
    assert library is not None
    forbid(number)
    pool = NativePool(library, n_threads=2)
    memory = PageAlignedMemory(PAGE_BYTES)
    file = os.open(path, os.O_RDONLY)
    expected = checksum(os.pread(file, PAGE_BYTES, 0))
    pool.add(PART.pack(7, file, DIRECT, 0, PAGE_BYTES, memory.address, PAGE_BYTES, expected), 1, n_unended=1)
    deadline_s = time.monotonic() + 30
    while not (found := pool.poll()) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    print(pool.has_ring, found, flush=True)
    os._exit(0)  # a normal exit would wait for hanging threads


if __name__ == "__main__":
    main()

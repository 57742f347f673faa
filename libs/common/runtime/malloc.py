"""How this process keeps memory: a message of some hundred kilobytes should cost its bytes and no more.

glibc asks the kernel for a block of 128 KiB or more and gives it back when it is freed, as it does with free
memory at the heap's end. The next block of that size comes in fresh pages, each a fault and four kilobytes of
zeros: to copy a message of a prompt of 32,000 tokens took 264 us, and takes 12 with this.

Each arena of glibc keeps its own, and threads get up to eight of them a core by default: here eight in all.

And what an interpreter works with lies all over its memory: in pages of 4 KiB it is more of them than the
processor keeps the addresses of.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_MMAP_BYTES = 32 << 20  # the most that glibc takes
_COLLAPSE = 25  # MADV_COLLAPSE of linux/mman.h, Linux 6.1
_LARGE_PAGE_BYTES = 2 << 20
_ARENAS = 8  # with two of them gRPC's threads wait for each other


def keep_freed_memory(n_bytes: int) -> bool:
    """Keep freed memory for the next blocks; of what is free at the end of each arena `n_bytes`.

    The process stays about as large as it ever was. Call before there are other threads. False where the C
    library is not glibc.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_ARENA_MAX, _ARENAS), (_M_MMAP_THRESHOLD, _MMAP_BYTES), (_M_TRIM_THRESHOLD, n_bytes))
    return all([mallopt(name, value) for name, value in settings])


def use_large_pages(*, maps: Path = Path("/proc/self/maps")) -> int:
    """Move the private memory that this process has by now into pages of 2 MiB; returns how many.

    It is copied while the process stands still, some 2 ms each. Ranges that have no memory yet (stacks) stay
    as they are; a kernel that cannot do it moves none.
    """
    try:
        madvise = ctypes.CDLL(None).madvise
        # Files are mapped under any names.
        ranges = [line.split() for line in maps.read_text(errors="replace").split("\n") if line]
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for where, permissions, _, _, _, *name in ranges:
        if permissions == "rw-p" and name in ([], ["[heap]"]):
            begin, end = (int(address, 16) for address in where.split("-"))
            first = -(-begin // _LARGE_PAGE_BYTES) * _LARGE_PAGE_BYTES
            for at in range(first, end - _LARGE_PAGE_BYTES + 1, _LARGE_PAGE_BYTES):
                moved += madvise(at, _LARGE_PAGE_BYTES, _COLLAPSE) == 0
    return moved

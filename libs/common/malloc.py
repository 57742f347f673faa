"""How this process keeps memory: a message of some hundred kilobytes should cost its bytes and no more.

glibc asks the kernel for a block of 128 KiB or more and gives it back when it is freed, as it does with free
memory at the heap's end. The next block of that size comes in fresh pages, each a fault and four kilobytes of
zeros: to copy a message of a prompt of 32,000 tokens took 264 us, and takes 12 with this.

Each arena of glibc keeps its own, and threads get up to eight of them a core by default: here eight in all.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
_MMAP_BYTES = 32 << 20  # the most that glibc takes
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

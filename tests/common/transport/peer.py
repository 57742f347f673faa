"""A peer process: registers memory with a pattern, prints session id and address as JSON, and serves.

It ends when its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys

from libs.common.transport.open import open_transport
from libs.common.transport.registered_memory import PageAlignedMemory


def pattern(n_bytes: int, seed: int) -> bytes:
    """Return bytes that differ by position and by seed, with a prime period."""
    period = bytes((seed + i * 31) % 251 for i in range(65521))
    return (period * (n_bytes // len(period) + 1))[:n_bytes]


def fill(memory: PageAlignedMemory, seed: int) -> None:
    """Write `pattern` over the whole memory without a second copy."""
    piece = pattern(65521 * 16, seed)
    for start in range(0, memory.n_bytes, len(piece)):
        view = memory.view(start, min(len(piece), memory.n_bytes - start))
        view[:] = piece[: len(view)]


async def main(kind: str, n_bytes: int, seed: int) -> None:
    transport = open_transport(kind)
    memory = PageAlignedMemory(n_bytes)
    fill(memory, seed)
    region = transport.register(memory.buffer)
    print(json.dumps({"session": transport.session_id, "address": region.address}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))

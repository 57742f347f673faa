"""Reads at a name that is added while it runs: python -m tests.support.network.late_name_reader KIND FILE

It prints "unknown" when a read failed for want of the name, adds the name to FILE, and prints "read" when a
read brought the bytes. The process needs the library of names (late_names.py).
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from libs.common.transport.base import ReadOp
from libs.common.transport.open import open_transport
from slipstream.errors import TransferError

NAME = "lender.test"
N_BYTES = 4096


async def main(kind: str, names: Path) -> None:
    """Read until the bytes are there. The lender starts before its name resolves."""
    lender = open_transport(kind, bind="127.0.0.1:0", advertise=f"{NAME}:0")
    reader = open_transport(kind)
    source, destination = bytearray(b"kv" * (N_BYTES // 2)), bytearray(N_BYTES)
    op = ReadOp(reader.register(destination).address, lender.register(source).address, N_BYTES)
    while destination != source:
        try:
            await reader.read(lender.session_id, [op], timeout_s=60)
        except TransferError as error:
            print("unknown", error, flush=True)
            await asyncio.to_thread(names.write_text, f"{NAME} 127.0.0.1\n")
    print("read", lender.session_id, flush=True)
    await reader.close()
    await lender.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))

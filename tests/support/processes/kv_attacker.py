"""Another process of the machine, which overwrites all KV that it can reach through Mooncake's ports.

    python -m tests.support.processes.kv_attacker PID..

It has no credential: it finds the engines' ports by looking for listening sockets, and asks each engine for
its registered memory. After each sweep it prints {pid: pieces written}. It ends when its input does.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

PIECE_BYTES = 256 << 10
MAX_REGION_BYTES = 4 << 30
# The lowest copies and slots are used first, so most sweeps cover only them.
HOT_BYTES = 4 << 20
_WHOLE_SWEEP_EVERY = 40
# 127.0.0.1, the same address mapped to IPv6, and ::1, as /proc writes them.
_LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def listening_ports(pid: int) -> dict[int, bool]:
    """The TCP ports on which a process listens, and whether each is on loopback only."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(descriptor)
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found: dict[int, bool] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].rsplit(":", 1)
                found[int(port, 16)] = found.get(int(port, 16), True) and address in _LOOPBACK
    return found


class Attacker:
    """The engine that writes, and the memory that it has found, by process."""

    def __init__(self) -> None:
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self._garbage = bytearray(os.urandom(PIECE_BYTES))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._garbage))
        assert self._engine.register_memory(self._address, PIECE_BYTES) == 0

    def region(self, pid: int) -> tuple[str, int] | None:
        """An engine of the process and the address of its first region."""
        for port, is_loopback in sorted(listening_ports(pid).items()):
            if not is_loopback and 15_000 <= port < 17_000:
                peer = f"127.0.0.1:{port}"
                if (address := self._engine.get_first_buffer_address(peer)) and address > 0:
                    return peer, address
        return None

    def sweep(self, peer: str, address: int, n_bytes: int, ended: threading.Event) -> int:
        """Overwrite the region's first bytes until `ended`. Returns how many pieces the engine accepted."""
        for number in range(n_bytes // PIECE_BYTES):
            if ended.is_set():
                return number
            at = address + number * PIECE_BYTES
            if self._engine.transfer_sync_write(peer, self._address, at, PIECE_BYTES) != 0:
                return number
        return n_bytes // PIECE_BYTES


def main() -> None:
    """Overwrite until the input ends."""
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    attacker, written = Attacker(), {pid: 0 for pid in map(int, sys.argv[1:])}
    regions = {pid: attacker.region(pid) for pid in written}
    for number in itertools.count():
        for pid, region in regions.items():
            if region is not None:
                n_bytes = HOT_BYTES if number % _WHOLE_SWEEP_EVERY else MAX_REGION_BYTES
                written[pid] += attacker.sweep(*region, n_bytes, ended)
        print(json.dumps(written), flush=True)
        if ended.is_set():
            break
    os._exit(0)


if __name__ == "__main__":
    main()

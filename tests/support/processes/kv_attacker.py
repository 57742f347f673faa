"""Another process of the machine, which overwrites all KV that it can reach through Mooncake's ports.

    python -m tests.support.processes.kv_attacker PID..

It has no credential. It finds the engines' ports by looking for listening sockets, and writes to all memory
of their processes that no fork copies, as all KV is. The engines refuse what is not registered. After each
sweep it prints {pid: [[bytes of a region, pieces written], ..]} of what is. It ends when its input does.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from libs.common.transport.registered_memory import HUGE_PAGE_BYTES

PIECE_BYTES = 256 << 10
# The lowest copies and slots are used first, so most sweeps cover only them.
HOT_BYTES = 4 << 20
_WHOLE_SWEEP_EVERY = 40
# Of a worker: staged copies and draft features.
_FEW_REGIONS = 2
_SPAN = re.compile(r"([0-9a-f]+)-([0-9a-f]+) [r-][w-][x-][ps] ")
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

    def regions(self, pid: int) -> tuple[str, list[tuple[int, int]]]:
        """An engine of the process, and where its registered memory begins, and how long it is."""
        for port, is_loopback in sorted(listening_ports(pid).items()):
            if not is_loopback and 15_000 <= port < 17_000:
                peer = f"127.0.0.1:{port}"
                if self._engine.get_first_buffer_address(peer) > 0:
                    return peer, self._registered(peer, unforked_memory(pid))
        return "", []

    def _registered(self, peer: str, mappings: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The parts of these mappings that the engine lets others write, where each begins such a part.

        The kernel may have joined some; where few begin one, all of each is tried.
        """
        for is_whole in (False, True):
            found: list[tuple[int, int]] = []
            for begin, n_bytes in mappings:
                for address in range(begin, begin + n_bytes, HUGE_PAGE_BYTES):
                    if not self.sweep(peer, address, PIECE_BYTES, None):
                        if not is_whole:
                            break
                    elif found and sum(found[-1]) == address:
                        found[-1] = (found[-1][0], found[-1][1] + HUGE_PAGE_BYTES)
                    else:
                        found.append((address, HUGE_PAGE_BYTES))
            if len(found) >= _FEW_REGIONS:
                break
        return found

    def sweep(self, peer: str, address: int, n_bytes: int, ended: threading.Event | None) -> int:
        """Overwrite the region's first bytes until `ended`, or one piece. Returns how many were accepted."""
        for number in range(n_bytes // PIECE_BYTES if ended is not None else 1):
            if ended is not None and ended.is_set():
                return number
            at = address + number * PIECE_BYTES
            if self._engine.transfer_sync_write(peer, self._address, at, PIECE_BYTES) != 0:
                return number
        return n_bytes // PIECE_BYTES if ended is not None else 1


def unforked_memory(pid: int) -> list[tuple[int, int]]:
    """The address, where KV may begin, and the length of each mapping that a forked child does not get."""
    found = []
    begin = end = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if span := _SPAN.match(line):
            begin, end = int(span[1], 16), int(span[2], 16)
        elif line.startswith("VmFlags:") and "dc" in line.split():
            start = (
                -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if end - begin >= HUGE_PAGE_BYTES else begin
            )
            found.append((start, end - start))
    return found


def main() -> None:
    """Overwrite until the input ends."""
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    attacker = Attacker()
    found = {pid: attacker.regions(pid) for pid in map(int, sys.argv[1:])}
    written: dict[int, Counter[int]] = {pid: Counter() for pid in found}
    for number in itertools.count():
        for pid, (peer, places) in found.items():
            for address, n_bytes in places:
                n_swept = n_bytes if number % _WHOLE_SWEEP_EVERY == 0 else min(n_bytes, HOT_BYTES)
                written[pid][address] += attacker.sweep(peer, address, n_swept, ended)
        rows = {
            pid: [(size, written[pid][place]) for place, size in places] for pid, (_, places) in found.items()
        }
        print(json.dumps(rows), flush=True)
        if ended.is_set():
            break
    os._exit(0)


if __name__ == "__main__":
    main()

"""Starting, stopping and ending real peers; memory registered for reading into."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from libs.common.registered_memory import PageAlignedMemory
from libs.common.transport.base import KvTransport

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
BIG_BYTES = 128 * MIB


@dataclass
class Peer:
    process: subprocess.Popen[str]
    session: str
    address: int


SpawnPeer = Callable[..., Peer]


def start_peer(kind: str, n_bytes: int, seed: int) -> Peer:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.common.transport.peer", kind, str(n_bytes), str(seed)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    return Peer(process, said["session"], said["address"])


def end_peer(peer: Peer) -> None:
    peer.process.kill()
    peer.process.wait(timeout=10)
    for pipe in (peer.process.stdin, peer.process.stdout):
        assert pipe is not None
        pipe.close()


def registered(transport: KvTransport, n_bytes: int) -> PageAlignedMemory:
    memory = PageAlignedMemory(n_bytes)
    transport.register(memory.buffer)
    return memory


def stop(peer: Peer) -> None:
    """SIGSTOP, and wait until the whole process has stopped."""
    peer.process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{peer.process.pid}/task")
    deadline = time.monotonic() + 10
    while any((task / "stat").read_text().rsplit(")", 1)[1].split()[0] != "T" for task in tasks.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def first_byte_landed(memory: PageAlignedMemory) -> None:
    deadline = time.monotonic() + 20
    tail = memory.view(0, MIB)
    while tail[1:64] == bytes(63):
        assert time.monotonic() < deadline
        await asyncio.sleep(0)

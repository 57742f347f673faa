"""Starting, stopping and ending real peers; memory registered for reading into."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.common.transport.base import KvTransport, ReadOp, TransferTimeout
from libs.common.transport.registered_memory import PageAlignedMemory

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
BIG_BYTES = 128 * MIB
WAIT_S = 60.0


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
    peer.process.wait(timeout=60)
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
    deadline = time.monotonic() + WAIT_S
    while any((task / "stat").read_text().rsplit(")", 1)[1].split()[0] != "T" for task in tasks.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def stop_slowly(transport: Any) -> None:
    """On a slow machine it takes a while until a transfer that was told to stop has stopped."""
    transport._reads._stop_timeout_s = WAIT_S


async def surely(transport: KvTransport, session: str, reads: Sequence[ReadOp], **landed: Any) -> None:
    """A read whose peer is well. Only a slow machine makes it wait: then it is asked again."""
    for tries_left in (4, 3, 2, 1, 0):
        try:
            await transport.read(session, reads, timeout_s=WAIT_S, **landed)
            return
        except TransferTimeout:
            if not tries_left:
                raise


async def begun_read(
    transport: KvTransport, memory: PageAlignedMemory, peer: Peer, *, timeout_s: float = WAIT_S
) -> asyncio.Task[None]:
    """A read of BIG_BYTES whose first byte has landed, and that is not over."""
    first, op = memory.view(0, 64), ReadOp(memory.address, peer.address, BIG_BYTES)
    for _ in range(20):
        await surely(transport, peer.session, [ReadOp(memory.address, peer.address, 64)])
        memory.view(0, BIG_BYTES)[:] = bytes(BIG_BYTES)
        read = asyncio.create_task(transport.read(peer.session, [op], timeout_s=timeout_s))
        while first[1:] == bytes(63) and not read.done():
            await asyncio.sleep(0)
        if not read.done():
            return read
        await asyncio.wait({read})
    raise AssertionError("each read was over when its first byte was seen")


async def disturbed_read(
    transport: KvTransport,
    memory: PageAlignedMemory,
    peers: Iterable[Peer],
    disturb: Callable[[Peer, asyncio.Task[None]], object],
    *,
    timeout_s: float = WAIT_S,
) -> tuple[asyncio.Task[None], Peer]:
    """A read that has failed because it was disturbed after its first byte, and its peer.

    Where its last byte was on the way by then, it is begun again, with the next of `peers`.
    """
    for peer in peers:
        read = await begun_read(transport, memory, peer, timeout_s=timeout_s)
        disturb(peer, read)
        await asyncio.wait({read}, timeout=timeout_s + 2 * WAIT_S)
        assert read.done(), "it does not end"
        if read.cancelled() or read.exception() is not None:
            return read, peer
        peer.process.send_signal(signal.SIGCONT)
    raise AssertionError("each read was over before it could be disturbed")

"""Starts, stops and ends peer processes; registers memory as read destinations."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from libs.common.transport.base import KvTransport, ReadOp, TransferRefused, TransferTimeout
from libs.common.transport.registered_memory import PageAlignedMemory
from tests.support.processes.process_checks import suspend

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
    ready = json.loads(process.stdout.readline())
    return Peer(process, ready["session"], ready["address"])


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
    suspend(peer.process)


def stop_slowly(transport: Any) -> None:
    """Give cancelled transfers on slow machines enough time to stop."""
    transport._reads._stop_timeout_s = WAIT_S


async def read_with_retries(
    transport: KvTransport, session: str, reads: Sequence[ReadOp], *, refusals: int = 0, **landed: Any
) -> None:
    """Read from a working peer, and retry time-outs, which only a slow machine causes.

    `refusals`: so many are retried, too. Where a peer has a port of one that died, Mooncake fails reads until
    its pause before a new connection is over.
    """
    time_outs = 4
    while True:
        try:
            await transport.read(session, reads, timeout_s=WAIT_S, **landed)
            return
        except TransferTimeout:
            time_outs -= 1
            if time_outs < 0:
                raise
        except TransferRefused:
            refusals -= 1
            if refusals < 0:
                raise
            await asyncio.sleep(0.25)


async def start_large_read(
    transport: KvTransport, memory: PageAlignedMemory, peer: Peer, *, timeout_s: float = WAIT_S
) -> asyncio.Task[None]:
    """Start a read of BIG_BYTES, and return it after its first bytes and before its end."""
    first, op = memory.view(0, 64), ReadOp(memory.address, peer.address, BIG_BYTES)
    for _ in range(20):
        await read_with_retries(transport, peer.session, [ReadOp(memory.address, peer.address, 64)])
        memory.view(0, BIG_BYTES)[:] = bytes(BIG_BYTES)
        read = asyncio.create_task(transport.read(peer.session, [op], timeout_s=timeout_s))
        while first[1:] == bytes(63) and not read.done():
            await asyncio.sleep(0)
        if not read.done():
            return read
        await asyncio.wait({read})
    raise AssertionError("each read ended before its first byte was seen")


async def disturb_large_read(
    transport: KvTransport,
    memory: PageAlignedMemory,
    peers: Iterable[Peer],
    disturb: Callable[[Peer, asyncio.Task[None]], object],
    *,
    timeout_s: float = WAIT_S,
) -> tuple[asyncio.Task[None], Peer]:
    """Disturb a large read after its first byte; return the failed read and its peer.

    A read whose last byte was already sent succeeds: then the next of `peers` is used.
    """
    for peer in peers:
        read = await start_large_read(transport, memory, peer, timeout_s=timeout_s)
        disturb(peer, read)
        await asyncio.wait({read}, timeout=timeout_s + 2 * WAIT_S)
        assert read.done(), "the read does not end"
        if read.cancelled() or read.exception() is not None:
            return read, peer
        peer.process.send_signal(signal.SIGCONT)
    raise AssertionError("each read ended before it could be disturbed")

"""What every KV transport promises, proved on both kinds between real processes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from libs.common.registered_memory import PageAlignedMemory
from libs.common.transport.base import (
    KvTransport,
    PeerGone,
    ReadOp,
    Region,
    TransferRefused,
    TransferTimeout,
    TransportClosed,
)
from libs.common.transport.open import open_transport
from tests.common.transport.peer import pattern

ROOT = Path(__file__).parents[3]
MIB = 1 << 20
BIG_BYTES = 192 * MIB
# What `read` may take beyond its time-out, and the slack of a busy machine.
SETTLE_S, SLACK_S = 4.0, 10.0


@dataclass
class Peer:
    process: subprocess.Popen[str]
    session: str
    address: int


SpawnPeer = Callable[..., Peer]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(params=["mooncake", "socket"], scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transport(kind: str) -> AsyncIterator[KvTransport]:
    """One for all tests of a kind, which it must survive."""
    opened = open_transport(kind)
    yield opened
    assert opened.reads_in_flight == 0
    await opened.close()


@pytest.fixture
def spawn_peer(kind: str) -> Iterator[SpawnPeer]:
    """Makes peers that a test may harm."""
    peers: list[Peer] = []

    def spawn(n_bytes: int = 4 * MIB, seed: int = 1) -> Peer:
        peers.append(start_peer(kind, n_bytes, seed))
        return peers[-1]

    yield spawn
    for peer in peers:
        end_peer(peer)


@pytest.fixture(scope="module")
def calm_peer(kind: str) -> Iterator[Peer]:
    """A peer of BIG_BYTES with seed 1 that nobody harms."""
    peer = start_peer(kind, BIG_BYTES, 1)
    yield peer
    assert peer.process.poll() is None
    end_peer(peer)


@pytest.fixture(scope="module")
def big_memory(transport: KvTransport) -> PageAlignedMemory:
    """Room for a read that takes long enough to be disturbed. Zeroed by those who use it."""
    return registered(transport, BIG_BYTES)


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


async def test_scattered_reads_of_any_size_land_exactly_where_they_belong(
    transport: KvTransport, calm_peer: Peer
) -> None:
    n_bytes = 4 * MIB
    peer = calm_peer
    source = pattern(n_bytes, 1)
    memory = registered(transport, n_bytes)
    expected = bytearray(n_bytes)
    rng = random.Random(7)
    reads, at = [], 0
    for size in [1, 4095, 4096, 327_680, 2 * MIB + 5, *(rng.randrange(1, 9000) for _ in range(80))]:
        remote = rng.randrange(n_bytes - size)
        reads.append(ReadOp(memory.address + at, peer.address + remote, size))
        expected[at : at + size] = source[remote : remote + size]
        at += size + rng.randrange(3)
    assert at < n_bytes
    await transport.read(peer.session, reads, timeout_s=20)
    assert memory.view(0, n_bytes) == expected  # and nothing beside the destinations was touched
    assert transport.reads_in_flight == 0


async def test_two_transports_read_each_other_at_once(kind: str, transport: KvTransport) -> None:
    other = open_transport(kind)
    try:
        mine, theirs = registered(transport, 2 * MIB), registered(other, 2 * MIB)
        mine.view(0, MIB)[:] = pattern(MIB, 3)
        theirs.view(0, MIB)[:] = pattern(MIB, 4)
        await asyncio.gather(
            *(
                transport.read(
                    other.session_id, [ReadOp(mine.address + MIB, theirs.address, MIB)], timeout_s=20
                )
                for _ in range(6)
            ),
            other.read(transport.session_id, [ReadOp(theirs.address + MIB, mine.address, MIB)], timeout_s=20),
        )
        assert mine.view(MIB, MIB) == pattern(MIB, 4)
        assert theirs.view(MIB, MIB) == pattern(MIB, 3)
        late = registered(other, 4096)  # registered after the first contact
        late.view(0, 4096)[:] = pattern(4096, 9)
        await transport.read(other.session_id, [ReadOp(mine.address, late.address, 4096)], timeout_s=20)
        assert mine.view(0, 4096) == pattern(4096, 9)
    finally:
        await other.close()


@pytest.mark.parametrize("offset", [-4096, BIG_BYTES - 100, 1 << 40])
async def test_addresses_outside_the_peers_registered_memory_are_refused(
    transport: KvTransport, calm_peer: Peer, offset: int
) -> None:
    peer = calm_peer
    memory = registered(transport, MIB)
    with pytest.raises(TransferRefused):
        await transport.read(
            peer.session, [ReadOp(memory.address, peer.address + offset, 4096)], timeout_s=10
        )
    # The peer is unharmed and goes on serving.
    await transport.read(peer.session, [ReadOp(memory.address, peer.address, 4096)], timeout_s=10)
    assert memory.view(0, 4096) == pattern(4096, 1)


async def test_destinations_outside_own_registered_memory_are_refused(
    transport: KvTransport, calm_peer: Peer
) -> None:
    peer = calm_peer
    unregistered = PageAlignedMemory(MIB)
    memory = registered(transport, MIB)
    for address, n_bytes in [
        (unregistered.address, 4096),
        (memory.address + MIB - 10, 20),
        (memory.address, 0),
    ]:
        with pytest.raises(TransferRefused):
            await transport.read(peer.session, [ReadOp(address, peer.address, n_bytes)], timeout_s=10)
    assert unregistered.view(0, 4096) == bytes(4096)


async def test_what_cannot_be_registered_is_refused(transport: KvTransport) -> None:
    for bad in (bytes(10), bytearray(), Region(0, 10), Region(4096, 0)):
        with pytest.raises(TransferRefused):
            transport.register(bad)


@pytest.mark.parametrize("session", ["", "nonsense", "127.0.0.1:99999/1/00", "127.0.0.1:1/zz", "a/b/c/d"])
async def test_malformed_session_ids_are_refused(transport: KvTransport, session: str) -> None:
    memory = registered(transport, 4096)
    with pytest.raises(TransferRefused):
        await transport.read(session, [ReadOp(memory.address, 4096, 10)], timeout_s=5)


async def test_a_killed_peer_is_gone_at_once_and_for_good(
    transport: KvTransport, spawn_peer: SpawnPeer
) -> None:
    peer, other = spawn_peer(), spawn_peer(seed=2)
    memory = registered(transport, MIB)
    op = ReadOp(memory.address, peer.address, MIB)
    await transport.read(peer.session, [op], timeout_s=10)
    peer.process.kill()
    peer.process.wait(timeout=10)
    for _ in range(2):
        with pytest.raises(PeerGone):
            await transport.read(peer.session, [op], timeout_s=10)
    await transport.read(other.session, [ReadOp(memory.address, other.address, MIB)], timeout_s=10)
    assert memory.view(0, MIB) == pattern(MIB, 2)
    assert transport.reads_in_flight == 0


async def test_a_peer_killed_mid_read_ends_the_read(
    transport: KvTransport, spawn_peer: SpawnPeer, big_memory: PageAlignedMemory
) -> None:
    size, memory = BIG_BYTES, big_memory
    memory.view(0, size)[:] = bytes(size)
    peer = spawn_peer(size)
    read = asyncio.create_task(
        transport.read(peer.session, [ReadOp(memory.address, peer.address, size)], timeout_s=30)
    )
    await first_byte_landed(memory)
    peer.process.kill()
    with pytest.raises((PeerGone, TransferTimeout)):
        await asyncio.wait_for(read, 30 + SETTLE_S)
    assert not transport.quarantined(memory.address, size)


async def test_a_stopped_peer_ends_the_read_in_bounded_time_and_no_late_byte_lands(
    transport: KvTransport, spawn_peer: SpawnPeer, big_memory: PageAlignedMemory
) -> None:
    size, memory = BIG_BYTES, big_memory
    memory.view(0, size)[:] = bytes(size)
    peer = spawn_peer(size)
    read = asyncio.create_task(
        transport.read(peer.session, [ReadOp(memory.address, peer.address, size)], timeout_s=1)
    )
    await first_byte_landed(memory)
    stop(peer)
    started = time.monotonic()
    with pytest.raises(TransferTimeout) as caught:
        await read
    assert time.monotonic() - started < 1 + SETTLE_S + SLACK_S
    assert caught.value.quiet
    assert not transport.quarantined(memory.address, size)
    assert transport.reads_in_flight == 0
    # The owner takes its memory back; the peer wakes up and may do what it likes.
    memory.view(0, size)[:] = bytes(size)
    peer.process.send_signal(signal.SIGCONT)
    small = registered(transport, 4096)
    await transport.read(peer.session, [ReadOp(small.address, peer.address, 4096)], timeout_s=20)
    assert small.view(0, 4096) == pattern(4096, 1)
    assert memory.view(0, size) == bytes(size)


async def test_first_contact_with_a_stopped_peer_is_bounded_and_harms_no_other_read(
    transport: KvTransport, spawn_peer: SpawnPeer
) -> None:
    stopped, alive = spawn_peer(), spawn_peer(seed=2)
    stop(stopped)
    memory = registered(transport, 2 * MIB)
    started = time.monotonic()
    hopeless = asyncio.create_task(
        transport.read(stopped.session, [ReadOp(memory.address, stopped.address, MIB)], timeout_s=2)
    )
    await transport.read(alive.session, [ReadOp(memory.address + MIB, alive.address, MIB)], timeout_s=10)
    assert memory.view(MIB, MIB) == pattern(MIB, 2)
    with pytest.raises(TransferTimeout):
        await hopeless
    assert time.monotonic() - started < 2 + SETTLE_S + SLACK_S
    stopped.process.send_signal(signal.SIGCONT)
    await transport.read(stopped.session, [ReadOp(memory.address, stopped.address, MIB)], timeout_s=10)
    assert memory.view(0, MIB) == pattern(MIB, 1)


async def test_cancelling_a_read_leaves_nothing_in_flight(
    transport: KvTransport, calm_peer: Peer, big_memory: PageAlignedMemory
) -> None:
    size, memory = BIG_BYTES, big_memory
    memory.view(0, size)[:] = bytes(size)
    peer = calm_peer
    read = asyncio.create_task(
        transport.read(peer.session, [ReadOp(memory.address, peer.address, size)], timeout_s=30)
    )
    await first_byte_landed(memory)
    read.cancel()
    with pytest.raises(asyncio.CancelledError):
        await read
    assert transport.reads_in_flight == 0
    assert not transport.quarantined(memory.address, size)
    memory.view(0, size)[:] = bytes(size)
    await transport.read(peer.session, [ReadOp(memory.address, peer.address, 100)], timeout_s=10)
    assert memory.view(100, size - 100) == bytes(size - 100)


async def test_a_successor_is_not_reached_under_its_predecessors_id(
    transport: KvTransport, calm_peer: Peer
) -> None:
    peer = calm_peer
    memory = registered(transport, 4096)
    impostor = peer.session[:-32] + os.urandom(16).hex()  # same address, another incarnation
    with pytest.raises(PeerGone):
        await transport.read(impostor, [ReadOp(memory.address, peer.address, 4096)], timeout_s=10)
    assert memory.view(0, 4096) == bytes(4096)


async def test_nothing_works_after_close_and_close_ends_reads(kind: str, calm_peer: Peer) -> None:
    size = BIG_BYTES
    peer = calm_peer
    transport = open_transport(kind)
    memory = registered(transport, size)
    read = asyncio.create_task(
        transport.read(peer.session, [ReadOp(memory.address, peer.address, size)], timeout_s=30)
    )
    await first_byte_landed(memory)
    await transport.close()
    with pytest.raises(TransferTimeout):
        await read
    await transport.close()
    with pytest.raises(TransportClosed):
        transport.register(bytearray(10))
    with pytest.raises(TransportClosed):
        await transport.read(peer.session, [], timeout_s=1)


FORK = """
import asyncio, os
from libs.common.transport.base import TransportClosed
from libs.common.transport.open import open_transport

transport = open_transport("{kind}")
child = os.fork()
if child == 0:
    try:
        transport.register(bytearray(10))
    except TransportClosed:
        raise SystemExit(7)  # an ordinary exit, destructors and all
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
asyncio.run(transport.close())
"""


async def test_a_forked_child_may_not_use_the_transport_and_exits_normally(kind: str) -> None:
    command = [sys.executable, "-c", FORK.format(kind=kind)]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.split() == ["7"], done.stderr


async def test_opening_and_closing_leaks_no_thread_and_no_descriptor(kind: str) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    await open_transport(kind).close()
    before = held()
    for _ in range(2):
        opened = open_transport(kind)
        memory = registered(opened, MIB)
        await opened.read(
            opened.session_id, [ReadOp(memory.address, memory.address + 4096, 4096)], timeout_s=10
        )
        await opened.close()
    deadline = time.monotonic() + 10
    while held() > before and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert held()[0] <= before[0] + 1  # the loop's own executor may have grown by a thread
    assert held()[1] <= before[1]


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

"""Crashed, stopped and stalled peers, cancelled reads: typed errors in bounded time, no late bytes."""

from __future__ import annotations

import asyncio
import signal
from itertools import repeat

import pytest

from libs.common.transport import incarnation_probe as probe
from libs.common.transport.base import (
    KvTransport,
    PeerGone,
    ReadOp,
    TransferTimeout,
    TransportClosed,
)
from libs.common.transport.open import open_transport
from libs.common.transport.registered_memory import PageAlignedMemory
from tests.common.transport.peer import pattern
from tests.common.transport.peers import (
    BIG_BYTES,
    MIB,
    WAIT_S,
    Peer,
    SpawnPeer,
    disturb_large_read,
    read_with_retries,
    registered,
    start_large_read,
    stop,
    stop_slowly,
)
from tests.support.defaults import set_default
from tests.support.processes.process_checks import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")
# How much longer than its time-out `read` may take: until its transfer ended, and slack for a busy machine.
STOP_TIMEOUT_S, SLACK_S = WAIT_S, WAIT_S
FIRST_GREETING_S = 4.0


async def test_reads_from_a_killed_peer_raise_peer_gone_every_time(
    transport: KvTransport, spawn_peer: SpawnPeer
) -> None:
    peer, other = spawn_peer(), spawn_peer(seed=2)
    memory = registered(transport, MIB)
    op = ReadOp(memory.address, peer.address, MIB)
    await read_with_retries(transport, peer.session, [op])
    peer.process.kill()
    peer.process.wait(timeout=60)
    for _ in range(2):
        with pytest.raises(PeerGone):
            await read_with_retries(transport, peer.session, [op])
    await read_with_retries(transport, other.session, [ReadOp(memory.address, other.address, MIB)])
    assert memory.view(0, MIB) == pattern(MIB, 2)
    assert transport.reads_in_flight == 0


async def test_killing_a_peer_during_a_read_fails_the_read(
    transport: KvTransport, spawn_peer: SpawnPeer, big_memory: PageAlignedMemory
) -> None:
    size, memory = BIG_BYTES, big_memory
    victims = (spawn_peer(size) for _ in range(5))
    read, _ = await disturb_large_read(transport, memory, victims, lambda peer, _: peer.process.kill())
    with pytest.raises((PeerGone, TransferTimeout)):
        await read
    assert not transport.quarantined(memory.address, size)


async def test_a_read_from_a_stopped_peer_fails_in_bounded_time_without_late_bytes(
    transport: KvTransport, spawn_peer: SpawnPeer, big_memory: PageAlignedMemory
) -> None:
    size, memory = BIG_BYTES, big_memory
    one = spawn_peer(size)
    read, peer = await disturb_large_read(
        transport, memory, repeat(one, 20), lambda peer, _: stop(peer), timeout_s=1
    )
    with pytest.raises(TransferTimeout) as caught:
        await read
    assert caught.value.quiet
    assert not transport.quarantined(memory.address, size)
    assert transport.reads_in_flight == 0
    # The owner reuses its memory; the resumed peer may still send.
    memory.view(0, size)[:] = bytes(size)
    peer.process.send_signal(signal.SIGCONT)
    small = registered(transport, 4096)
    await read_with_retries(transport, peer.session, [ReadOp(small.address, peer.address, 4096)])
    assert small.view(0, 4096) == pattern(4096, 1)
    assert memory.view(0, size) == bytes(size)


async def test_the_first_connection_to_a_stopped_peer_is_bounded_and_delays_no_other_read(
    transport: KvTransport, spawn_peer: SpawnPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing greets for the stopped peer; reads from the other one are tried again.
    set_default(monkeypatch, probe.greet, "timeout_s", FIRST_GREETING_S)
    stopped, alive = spawn_peer(), spawn_peer(seed=2)
    stop(stopped)
    memory = registered(transport, 2 * MIB)
    unserved = asyncio.create_task(
        transport.read(stopped.session, [ReadOp(memory.address, stopped.address, MIB)], timeout_s=2)
    )
    await read_with_retries(transport, alive.session, [ReadOp(memory.address + MIB, alive.address, MIB)])
    assert memory.view(MIB, MIB) == pattern(MIB, 2)
    with pytest.raises(TransferTimeout):
        await asyncio.wait_for(unserved, 2 + STOP_TIMEOUT_S + SLACK_S)
    stopped.process.send_signal(signal.SIGCONT)
    await read_with_retries(transport, stopped.session, [ReadOp(memory.address, stopped.address, MIB)])
    assert memory.view(0, MIB) == pattern(MIB, 1)


async def test_the_session_id_of_a_restarted_peer_differs_and_the_old_one_reads_nothing(
    transport: KvTransport, spawn_peer: SpawnPeer
) -> None:
    first = spawn_peer(seed=1)
    memory = registered(transport, MIB)
    await read_with_retries(transport, first.session, [ReadOp(memory.address, first.address, MIB)])
    first.process.kill()
    first.process.wait(timeout=60)
    memory.view(0, MIB)[:] = bytes(MIB)
    successor = spawn_peer(seed=2)
    assert successor.session != first.session
    for address in (first.address, successor.address):
        with pytest.raises(PeerGone):
            await read_with_retries(transport, first.session, [ReadOp(memory.address, address, MIB)])
    assert memory.view(0, MIB) == bytes(MIB)
    await read_with_retries(
        transport, successor.session, [ReadOp(memory.address, successor.address, MIB)], refusals=40
    )
    assert memory.view(0, MIB) == pattern(MIB, 2)


async def test_a_read_from_a_peer_that_runs_intermittently_ends_with_data_or_error(
    transport: KvTransport, spawn_peer: SpawnPeer, big_memory: PageAlignedMemory
) -> None:
    size, memory = BIG_BYTES, big_memory
    peer = spawn_peer(size)
    read = await start_large_read(transport, memory, peer, timeout_s=2)
    async with asyncio.timeout(2 + STOP_TIMEOUT_S + SLACK_S):
        while not read.done():
            peer.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(0.1)
            peer.process.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.01)
    if read.exception() is None:
        assert memory.view(size - MIB, MIB) == pattern(size, 1)[-MIB:]
    else:
        assert isinstance(read.exception(), TransferTimeout)
    peer.process.kill()
    await eventually(lambda: not transport.quarantined(memory.address, size), timeout_s=60)


async def test_queued_reads_of_a_stopped_peer_all_end_and_delay_no_other_peer(
    transport: KvTransport, shared_peer: Peer, spawn_peer: SpawnPeer
) -> None:
    stopped = spawn_peer()
    memory = registered(transport, 4 * MIB)
    await read_with_retries(transport, stopped.session, [ReadOp(memory.address, stopped.address, MIB)])
    stop(stopped)
    unserved = [
        asyncio.create_task(
            transport.read(
                stopped.session, [ReadOp(memory.address + i * 4096, stopped.address, 4096)], timeout_s=1
            )
        )
        for i in range(40)
    ]
    op = ReadOp(memory.address + MIB, shared_peer.address, MIB)
    await read_with_retries(transport, shared_peer.session, [op])
    assert memory.view(MIB, MIB) == pattern(MIB, 1)
    async with asyncio.timeout(1 + STOP_TIMEOUT_S + SLACK_S):
        for ended in await asyncio.gather(*unserved, return_exceptions=True):
            assert isinstance(ended, TransferTimeout)
    stopped.process.kill()
    await eventually(lambda: transport.reads_in_flight == 0, timeout_s=60)


async def test_a_cancelled_read_leaves_nothing_in_flight(
    transport: KvTransport, shared_peer: Peer, big_memory: PageAlignedMemory
) -> None:
    size, memory = BIG_BYTES, big_memory
    read, peer = await disturb_large_read(
        transport, memory, repeat(shared_peer, 20), lambda _, read: read.cancel()
    )
    with pytest.raises(asyncio.CancelledError):
        await read
    assert transport.reads_in_flight == 0
    assert not transport.quarantined(memory.address, size)
    memory.view(0, size)[:] = bytes(size)
    await read_with_retries(transport, peer.session, [ReadOp(memory.address, peer.address, 100)])
    assert memory.view(100, size - 100) == bytes(size - 100)


async def test_close_ends_reads_and_later_calls_fail(kind: str, shared_peer: Peer) -> None:
    peer = shared_peer
    for _ in range(5):  # until a close comes before the read's last byte is sent
        transport = open_transport(kind)
        stop_slowly(transport)
        memory = registered(transport, BIG_BYTES)
        read = await start_large_read(transport, memory, peer)
        await transport.close()
        await asyncio.wait({read}, timeout=WAIT_S)
        if read.exception() is not None:
            break
    assert isinstance(read.exception(), TransferTimeout)
    await transport.close()
    with pytest.raises(TransportClosed):
        transport.register(bytearray(10))
    with pytest.raises(TransportClosed):
        await transport.read(peer.session, [], timeout_s=1)

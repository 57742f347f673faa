"""The contract of KV transports, tested on both kinds between real processes."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys

import pytest

from libs.common.transport.base import (
    KvTransport,
    PeerGone,
    ReadOp,
    Region,
    TransferRefused,
)
from libs.common.transport.open import open_transport
from libs.common.transport.registered_memory import PageAlignedMemory
from tests.common.transport.peer import pattern
from tests.common.transport.peers import (
    BIG_BYTES,
    MIB,
    ROOT,
    WAIT_S,
    Peer,
    read_with_retries,
    registered,
)
from tests.support.processes.process_checks import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_scattered_reads_of_any_size_land_at_their_destinations_only(
    transport: KvTransport, shared_peer: Peer
) -> None:
    n_bytes = 4 * MIB
    peer = shared_peer
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
    await read_with_retries(transport, peer.session, reads)
    assert memory.view(0, n_bytes) == expected  # bytes outside of the destinations are unchanged
    assert transport.reads_in_flight == 0


async def test_two_transports_read_from_each_other_at_once(kind: str, transport: KvTransport) -> None:
    other = open_transport(kind)
    try:
        mine, theirs = registered(transport, 2 * MIB), registered(other, 2 * MIB)
        mine.view(0, MIB)[:] = pattern(MIB, 3)
        theirs.view(0, MIB)[:] = pattern(MIB, 4)
        await asyncio.gather(
            *(
                read_with_retries(
                    transport, other.session_id, [ReadOp(mine.address + MIB, theirs.address, MIB)]
                )
                for _ in range(6)
            ),
            read_with_retries(other, transport.session_id, [ReadOp(theirs.address + MIB, mine.address, MIB)]),
        )
        assert mine.view(MIB, MIB) == pattern(MIB, 4)
        assert theirs.view(MIB, MIB) == pattern(MIB, 3)
        late = registered(other, 4096)  # registered after the first connection
        late.view(0, 4096)[:] = pattern(4096, 9)
        await read_with_retries(transport, other.session_id, [ReadOp(mine.address, late.address, 4096)])
        assert mine.view(0, 4096) == pattern(4096, 9)
    finally:
        await other.close()


@pytest.mark.parametrize("offset", [-4096, BIG_BYTES - 100, 1 << 40])
async def test_source_addresses_outside_registered_memory_are_refused(
    transport: KvTransport, shared_peer: Peer, offset: int
) -> None:
    peer = shared_peer
    memory = registered(transport, MIB)
    with pytest.raises(TransferRefused):
        await read_with_retries(
            transport, peer.session, [ReadOp(memory.address, peer.address + offset, 4096)]
        )
    # The peer still serves.
    await read_with_retries(transport, peer.session, [ReadOp(memory.address, peer.address, 4096)])
    assert memory.view(0, 4096) == pattern(4096, 1)


async def test_destinations_outside_registered_memory_are_refused(
    transport: KvTransport, shared_peer: Peer
) -> None:
    peer = shared_peer
    unregistered = PageAlignedMemory(MIB)
    memory = registered(transport, MIB)
    for address, n_bytes in [
        (unregistered.address, 4096),
        (memory.address + MIB - 10, 20),
        (memory.address, 0),
    ]:
        with pytest.raises(TransferRefused):
            await read_with_retries(transport, peer.session, [ReadOp(address, peer.address, n_bytes)])
    assert unregistered.view(0, 4096) == bytes(4096)


async def test_unsuitable_memory_is_not_registered(transport: KvTransport) -> None:
    for bad in (bytes(10), bytearray(), Region(0, 10), Region(4096, 0)):
        with pytest.raises(TransferRefused):
            transport.register(bad)


@pytest.mark.parametrize("session", ["", "nonsense", "127.0.0.1:99999/1/00", "127.0.0.1:1/zz", "a/b/c/d"])
async def test_malformed_session_ids_are_refused(transport: KvTransport, session: str) -> None:
    memory = registered(transport, 4096)
    with pytest.raises(TransferRefused):
        await read_with_retries(transport, session, [ReadOp(memory.address, 4096, 10)])


async def test_a_new_incarnation_is_not_reached_by_the_session_id_of_the_old_one(
    transport: KvTransport, shared_peer: Peer
) -> None:
    peer = shared_peer
    memory = registered(transport, 4096)
    impostor = peer.session[:-32] + os.urandom(16).hex()  # same address, another incarnation
    with pytest.raises(PeerGone):
        await read_with_retries(transport, impostor, [ReadOp(memory.address, peer.address, 4096)])
    assert memory.view(0, 4096) == bytes(4096)


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


async def test_a_forked_child_cannot_use_the_transport_and_exits_normally(kind: str) -> None:
    command = [sys.executable, "-c", FORK.format(kind=kind)]
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["7"], done.stderr


async def test_opening_and_closing_a_transport_leaks_no_thread_or_descriptor(kind: str) -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    await open_transport(kind).close()
    before = held()
    for _ in range(2):
        opened = open_transport(kind)
        memory = registered(opened, MIB)
        own = [ReadOp(memory.address, memory.address + 4096, 4096)]
        await read_with_retries(opened, opened.session_id, own)
        await opened.close()

    def back_to_before() -> bool:
        threads, descriptors = held()
        # The loop's default executor may have started one more thread.
        return threads <= before[0] + 1 and descriptors <= before[1]

    await eventually(back_to_before)


async def test_reads_fill_private_memory_that_peers_neither_read_nor_write(kind: str) -> None:
    lender, reader, stranger = (open_transport(kind) for _ in range(3))
    source, private = registered(lender, 2 * MIB), PageAlignedMemory(2 * MIB)
    registered(reader, 2 * MIB)  # as a worker's staging memory
    source.buffer[: 2 * MIB] = os.urandom(2 * MIB)
    landing = registered(stranger, 2 * MIB)
    to_private = [ReadOp(private.address, source.address, 2 * MIB)]
    with pytest.raises(TransferRefused):
        await reader.read(lender.session_id, to_private, timeout_s=WAIT_S)
    reader.add_destination(private.buffer)
    await reader.read(lender.session_id, to_private, timeout_s=WAIT_S)
    assert bytes(private.buffer[: 2 * MIB]) == bytes(source.buffer[: 2 * MIB])
    with pytest.raises(TransferRefused):
        await stranger.read(
            reader.session_id, [ReadOp(landing.address, private.address, 64)], timeout_s=WAIT_S
        )
    for transport in (lender, reader, stranger):
        await transport.close()

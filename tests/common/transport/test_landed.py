"""`landed` is called for each op once all its bytes have landed; readers share lanes evenly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.checksum import memory_at
from libs.common.transport.base import KvTransport, ReadOp
from libs.common.transport.mooncake_read import LANES, MooncakePeer
from slipstream.errors import TransferError
from tests.common.transport.peer import pattern
from tests.common.transport.peers import BIG_BYTES, MIB, WAIT_S, Peer, SpawnPeer, registered


@pytest.mark.asyncio(loop_scope="module")
async def test_each_op_is_reported_once_with_all_its_bytes_landed(
    transport: KvTransport, shared_peer: Peer
) -> None:
    sizes = [2 * MIB, 4096, 5 * MIB + 3, 1, MIB, *[100_000] * 40]
    memory, source = registered(transport, sum(sizes)), pattern(16 * MIB, 1)
    reads, at = [], 0
    for size in sizes:
        reads.append(ReadOp(memory.address + at, shared_peer.address + at % MIB, size))
        at += size
    for _ in range(3):  # the first read also opens connections
        memory.view(0, at)[:] = bytes(at)
        seen: list[tuple[ReadOp, bool]] = []

        def landed(op: ReadOp, seen: list[tuple[ReadOp, bool]] = seen) -> None:
            first = op.remote_address - shared_peer.address
            whole = memory_at(op.local_address, op.n_bytes) == source[first : first + op.n_bytes]
            seen.append((op, whole))

        await transport.read(shared_peer.session, reads, timeout_s=WAIT_S, landed=landed)
        assert all(whole for _, whole in seen)
        assert sorted(seen, key=lambda each: each[0].local_address) == [(op, True) for op in reads]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("size", [MIB, 3 * MIB])
async def test_an_error_of_the_callback_fails_the_read_after_its_last_byte_landed(
    transport: KvTransport, shared_peer: Peer, size: int
) -> None:
    memory = registered(transport, 16 * size)
    reads = [ReadOp(memory.address + i * size, shared_peer.address + i * size, size) for i in range(16)]

    def landed(op: ReadOp) -> None:
        if op is reads[3]:
            raise ValueError("not what it should be")

    with pytest.raises(ValueError, match="not what it should be"):
        await transport.read(shared_peer.session, reads, timeout_s=WAIT_S, landed=landed)
    assert transport.reads_in_flight == 0
    memory.view(0, memory.n_bytes)[:] = bytes(memory.n_bytes)
    await transport.read(shared_peer.session, reads[:1], timeout_s=WAIT_S)
    assert memory.view(size, 15 * size) == bytes(15 * size)  # no late byte


@pytest.mark.asyncio(loop_scope="module")
async def test_an_op_that_did_not_land_is_not_reported(
    transport: KvTransport, spawn_peer: SpawnPeer, shared_peer: Peer
) -> None:
    small = spawn_peer(4 * MIB, 1)
    memory, reported = registered(transport, 4 * MIB), list[ReadOp]()
    good = [ReadOp(memory.address + i * MIB, small.address + i * MIB, MIB) for i in range(3)]
    beyond = ReadOp(memory.address + 3 * MIB, small.address + BIG_BYTES, MIB)
    with pytest.raises(TransferError):
        await transport.read(small.session, [*good, beyond], timeout_s=WAIT_S, landed=reported.append)
    assert beyond not in reported
    assert len(set(reported)) == len(reported)
    for op in reported:
        assert (
            memory.view(op.local_address - memory.address, MIB)
            == pattern(4 * MIB, 1)[op.remote_address - small.address :][:MIB]
        )


SESSION = f"127.0.0.1:15001/2/{bytes(16).hex()}"


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=200))
def test_readers_share_the_lanes_of_a_peer_within_their_limit(steps: list[tuple[int, bool]]) -> None:
    peer, held = MooncakePeer(SESSION), dict[int, int]()
    for reader, grows in steps:
        if reader not in held:
            held[reader] = 0
            peer.n_readers += 1
        if grows:
            room = peer.room(held[reader])
            assert 0 <= room <= LANES
            held[reader] += room
            peer.n_elements += room
        elif held[reader]:
            held[reader] -= 1
            peer.n_elements -= 1
        assert sum(held.values()) == peer.n_elements <= LANES
        if len(held) == 1 and grows:
            assert peer.n_elements == LANES  # a single reader may use all lanes

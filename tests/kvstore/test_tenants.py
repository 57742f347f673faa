"""The whole control surface against tenants that lie: nobody ever gets another's bytes.

Tenants share the node, the model and the very same prompts; only their salts differ. What a tenant holds
is made from its hash, so that a block of anybody else is known by its bytes.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from libs.common.block_hash import chain_hashes, pack_hashes, unpack_hashes
from libs.common.checksum import checksum, checksum_at, memory_at
from libs.common.dial import dial
from libs.common.registered_memory import PageAlignedMemory
from libs.common.serve import ServiceHost
from libs.common.telemetry import Counters
from libs.common.transport.base import ReadOp
from libs.common.transport.socket import SocketTransport
from services.kvstore.dram_tier import DramTier
from services.kvstore.puts import Puts
from services.kvstore.service import KvstoreServicer
from services.kvstore.store import BlockStore
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc
from tests.kvstore.node import FINGERPRINT

BLOCK_BYTES, BLOCK_TOKENS, MAX_BLOCKS = 4096, 4, 6
ResultT = TypeVar("ResultT")
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}


def payload(block_hash: bytes) -> bytes:
    return random.Random(block_hash).randbytes(BLOCK_BYTES)


class World:
    """A node of little memory over real gRPC and sockets, and one worker that serves all tenants."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.now_ms = 0.0
        self.run(self._open())

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    async def _open(self) -> None:
        counters, dram = Counters(), DramTier(1 << 20)
        self.node_transport, self.transport = SocketTransport(), SocketTransport()
        self.node_transport.register(dram.memory.buffer)
        self.memory = PageAlignedMemory(4 * MAX_BLOCKS * BLOCK_BYTES)
        self.transport.register(self.memory.buffer)
        self.store = BlockStore(dram, None, counters, now_ms=lambda: self.now_ms)
        self.puts = Puts(self.store, self.node_transport, counters, now_ms=lambda: self.now_ms)
        self.host = ServiceHost("127.0.0.1:0")
        servicer = KvstoreServicer(
            self.store, self.puts, self.node_transport, check_accepting=lambda: None, changed=lambda: None
        )
        kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(servicer, self.host.server)
        await self.host.start(["slipstream.v1.KvstoreService"])
        self.channel = dial(self.host.endpoint)
        self.stub = kvstore_pb2_grpc.KvstoreServiceStub(self.channel)

    def call(self, method: str, request: Any) -> Any:
        """The answer, or the status code of a refusal."""

        async def ask() -> Any:
            try:
                return await getattr(self.stub, method)(request, timeout=60)
            except grpc.aio.AioRpcError as error:
                return error.code()

        return self.run(ask())

    def close(self) -> None:
        async def end() -> None:
            await self.channel.close()
            await self.host.stop(grace_s=0.2)
            await self.transport.close()
            await self.node_transport.close()

        self.run(end())
        self.loop.close()

    def end_leases(self) -> None:
        self.now_ms += 120_000
        self.store.expire()
        self.puts.expire()

    def reserve(self, hashes: list[bytes]) -> Any:
        return self.call(
            "Reserve",
            kvstore_pb2.ReserveRequest(
                fingerprint=FINGERPRINT,
                block_hashes=pack_hashes(hashes),
                block_bytes=BLOCK_BYTES,
                owner="w",
            ),
        )

    def commit(self, reservation_id: str, sources: list[kvstore_pb2.SourceBlock], session: str = "") -> Any:
        return self.call(
            "Commit",
            kvstore_pb2.CommitRequest(
                reservation_id=reservation_id,
                transport="socket",
                transport_session=session or self.transport.session_id,
                blocks=sources,
            ),
        )

    def source(self, index: int, block_hash: bytes, content: bytes) -> kvstore_pb2.SourceBlock:
        address = self.memory.address + index * BLOCK_BYTES
        memory_at(address, BLOCK_BYTES)[:] = content
        return kvstore_pb2.SourceBlock(
            block_hash=block_hash, address=address, n_bytes=BLOCK_BYTES, checksum=checksum(content)
        )

    def pin(self, hashes: list[bytes], first_block: int = 0) -> Any:
        request = kvstore_pb2.PinRequest(
            fingerprint=FINGERPRINT,
            block_hashes=pack_hashes(hashes),
            first_block=first_block,
            lease_ms=10_000,
            owner="r",
        )
        return self.call("Pin", request)

    def read(self, session: str, block: kvstore_pb2.PinnedBlock) -> bytes | None:
        """The bytes of a pinned block; None when its checksum tells that they are not the block's."""
        landing = self.memory.address + 3 * MAX_BLOCKS * BLOCK_BYTES
        self.run(self.transport.read(session, [ReadOp(landing, block.address, BLOCK_BYTES)], timeout_s=20))
        right = checksum_at(landing, BLOCK_BYTES) == block.checksum
        return bytes(memory_at(landing, BLOCK_BYTES)) if right else None


class Tenants(RuleBasedStateMachine):
    """Two tenants with the same prompts. `stored` is what was put honestly, by whoever."""

    world: World

    @initialize()
    def begin(self) -> None:
        self.salts = [os.urandom(16), os.urandom(16)]
        self.stored: set[bytes] = set()
        self.tickets: list[tuple[list[bytes], Any]] = []  # pins, live and ended
        self.live: set[str] = set()
        self.ended_reservations: list[tuple[str, list[bytes]]] = []

    def chain(self, who: int, prompt: int, n_blocks: int) -> list[bytes]:
        tokens = np.array([prompt] * BLOCK_TOKENS * n_blocks, dtype=np.uint32)
        return chain_hashes(tokens, root=FINGERPRINT.digest, salt=self.salts[who], block_tokens=BLOCK_TOKENS)

    @rule(who=st.integers(0, 1), prompt=st.integers(0, 2), n_blocks=st.integers(1, MAX_BLOCKS))
    def put(self, who: int, prompt: int, n_blocks: int) -> None:
        chain = self.chain(who, prompt, n_blocks)
        reserved = self.world.reserve(chain)
        wanted = unpack_hashes(reserved.wanted)
        assert set(wanted) <= set(chain)
        answer = self.world.commit(
            reserved.reservation_id, [self.world.source(i, h, payload(h)) for i, h in enumerate(wanted)]
        )
        if wanted:
            assert unpack_hashes(answer.committed) == wanted
            self.ended_reservations.append((reserved.reservation_id, wanted))
        self.stored.update(wanted)

    @rule(
        who=st.integers(0, 1),
        prompt=st.integers(0, 2),
        n_blocks=st.integers(1, MAX_BLOCKS),
        lie=st.sampled_from(
            ["length", "no length", "checksum", "another's key", "outside", "dead session", "own arena"]
        ),
    )
    def put_with_a_lie(self, who: int, prompt: int, n_blocks: int, lie: str) -> None:
        chain = self.chain(who, prompt + 10, n_blocks)
        reserved = self.world.reserve(chain)
        if not reserved.reservation_id:
            return
        session, sources = "", []
        for index, block_hash in enumerate(unpack_hashes(reserved.wanted)):
            source = self.world.source(index, block_hash, payload(block_hash))
            if lie == "length":
                source.n_bytes = random.choice([1, BLOCK_BYTES - 1, BLOCK_BYTES + 1, 2**63])
            elif lie == "no length":
                source.n_bytes = 0
            elif lie == "checksum":
                source.checksum = os.urandom(16)
            elif lie == "another's key":
                source.block_hash = self.chain(1 - who, prompt + 10, n_blocks)[index]
            elif lie == "outside":
                source.address = random.choice([0, 4096, 2**64 - 4096])
            elif lie == "dead session":
                session = self.world.transport.session_id[:-32] + os.urandom(16).hex()
            else:  # the node's own memory, where others' blocks are, as if it were the writer's
                session = self.world.node_transport.session_id
                source.address = self.world.store.dram.memory.address + index * BLOCK_BYTES
            sources.append(source)
        answer = self.world.commit(reserved.reservation_id, sources, session)
        assert set(unpack_hashes(answer.committed)) <= self.stored
        self.world.call(
            "CancelReservation",
            kvstore_pb2.CancelReservationRequest(reservation_id=reserved.reservation_id),
        )
        self.ended_reservations.append((reserved.reservation_id, chain))
        for liars in (chain, self.chain(1 - who, prompt + 10, n_blocks)):
            assert self.held(liars) <= len([h for h in liars if h in self.stored])

    @rule(which=st.integers(0, 1 << 20), who=st.integers(0, 1), prompt=st.integers(20, 22))
    def replay_a_reservation(self, which: int, who: int, prompt: int) -> None:
        if not self.ended_reservations:
            return
        reservation_id, _ = self.ended_reservations[which % len(self.ended_reservations)]
        fresh = self.chain(who, prompt, 1)[0]
        answer = self.world.commit(reservation_id, [self.world.source(0, fresh, payload(fresh))])
        assert answer == grpc.StatusCode.NOT_FOUND
        assert self.held([fresh]) == 0

    @rule(who=st.integers(0, 1), prompt=st.integers(0, 2), first_block=st.integers(0, 3))
    def pin(self, who: int, prompt: int, first_block: int) -> None:
        chain = self.chain(who, prompt, MAX_BLOCKS)
        pinned = self.world.pin(chain, first_block)
        for block, block_hash in zip(pinned.blocks, chain[first_block:], strict=False):
            assert block_hash in self.stored
            assert self.world.read(pinned.transport_session, block) == payload(block_hash)
        if pinned.lease_id:
            self.live.add(pinned.lease_id)
            self.tickets.append((chain[first_block:], pinned))

    @rule(prompt=st.integers(0, 2), forged=st.sampled_from(["salt", "mixed", "noise", "shifted"]))
    def pin_with_forged_hashes(self, prompt: int, forged: str) -> None:
        mine, theirs = self.chain(0, prompt, MAX_BLOCKS), self.chain(1, prompt, MAX_BLOCKS)
        if forged == "salt":
            tokens = np.array([prompt] * BLOCK_TOKENS * MAX_BLOCKS, dtype=np.uint32)
            chain = chain_hashes(
                tokens, root=FINGERPRINT.digest, salt=os.urandom(16), block_tokens=BLOCK_TOKENS
            )
        elif forged == "noise":
            chain = [os.urandom(16) for _ in range(MAX_BLOCKS)]
        elif forged == "mixed":
            chain = [
                bytes(a ^ b for a, b in zip(*pair, strict=True)) for pair in zip(mine, theirs, strict=True)
            ]
        else:
            packed = pack_hashes(theirs)
            chain = unpack_hashes(packed[8:] + packed[:8])
        assert self.held(chain) == 0
        assert not self.world.pin(chain).lease_id

    @rule(which=st.integers(0, 1 << 20), twice=st.booleans())
    def release(self, which: int, twice: bool) -> None:
        if not self.tickets:
            return
        lease_id = self.tickets[which % len(self.tickets)][1].lease_id
        request = kvstore_pb2.ReleasePinRequest(lease_id=lease_id)
        for _ in range(1 + twice):
            assert not isinstance(self.world.call("ReleasePin", request), grpc.StatusCode)
        self.live.discard(lease_id)
        assert self.world.store.pins == len(self.live)  # nobody else's went

    @rule(which=st.integers(0, 1 << 20))
    def replay_a_ticket(self, which: int) -> None:
        """Reads under an old pin find the block's own bytes, or bytes that its checksum refuses."""
        if not self.tickets:
            return
        hashes, pinned = self.tickets[which % len(self.tickets)]
        renewed = self.world.call("RenewPin", kvstore_pb2.RenewPinRequest(lease_id=pinned.lease_id))
        assert (renewed == grpc.StatusCode.NOT_FOUND) == (pinned.lease_id not in self.live)
        for block, block_hash in zip(pinned.blocks, hashes, strict=False):
            found = self.world.read(pinned.transport_session, block)
            assert found == payload(block_hash) or (found is None and pinned.lease_id not in self.live)

    @rule()
    def guess_ids(self) -> None:
        guess = os.urandom(16).hex()
        renew = kvstore_pb2.RenewPinRequest(lease_id=guess, lease_ms=60_000)
        assert self.world.call("RenewPin", renew) == grpc.StatusCode.NOT_FOUND
        self.world.call("ReleasePin", kvstore_pb2.ReleasePinRequest(lease_id=guess))
        assert self.world.store.pins == len(self.live)

    @rule(seed=st.integers(0, 1 << 30))
    def flood(self, seed: int) -> None:
        """Everything that is not pinned is evicted, and its slots are used anew."""
        rng = random.Random(seed)
        for _ in range(12):
            hashes = [rng.randbytes(16) for _ in range(2 * MAX_BLOCKS)]
            reserved = self.world.reserve(hashes)
            if isinstance(reserved, grpc.StatusCode):
                assert reserved == grpc.StatusCode.RESOURCE_EXHAUSTED
                return
            wanted = unpack_hashes(reserved.wanted)
            self.world.commit(
                reserved.reservation_id,
                [self.world.source(i, h, payload(h)) for i, h in enumerate(wanted)],
            )

    def held(self, chain: list[bytes]) -> int:
        request = kvstore_pb2.LookupRequest(fingerprint=FINGERPRINT, block_hashes=pack_hashes(chain))
        return int(self.world.call("Lookup", request).held_blocks)

    def teardown(self) -> None:
        self.world.end_leases()
        assert self.world.store.pins == self.world.puts.reservations == self.world.puts.reserved_blocks == 0
        assert self.world.store.orphaned_blocks == 0
        self.world.store.dram.table.check()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    opened = World()
    yield opened
    opened.close()


def test_nobody_gets_anothers_bytes_whatever_is_asked_lied_or_replayed(world: World) -> None:
    Tenants.world = world
    run_state_machine_as_test(
        Tenants,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


HASHES = st.one_of(st.binary(max_size=40), st.builds(lambda n: os.urandom(16 * n), st.integers(0, 9)))
WORDS = st.sampled_from(["", "x", "é" * 300, "socket", "127.0.0.1:1/" + "00" * 16])
U64 = st.sampled_from([0, 1, 4096, 2**31, 2**32, 2**63, 2**64 - 1])
U32 = st.sampled_from([0, 1, 100_000, 2**31, 2**32 - 1])
FINGERPRINTS = st.sampled_from([FINGERPRINT, None])
SOURCES = st.lists(
    st.builds(
        kvstore_pb2.SourceBlock,
        block_hash=st.one_of(st.binary(max_size=20), st.just(bytes(16))),
        address=U64,
        n_bytes=U64,
        checksum=st.one_of(st.binary(max_size=20), st.just(bytes(16))),
    ),
    max_size=3,
)
REQUESTS = st.one_of(
    st.builds(kvstore_pb2.LookupRequest, fingerprint=FINGERPRINTS, block_hashes=HASHES),
    st.builds(
        kvstore_pb2.PinRequest,
        fingerprint=FINGERPRINTS,
        block_hashes=HASHES,
        first_block=U32,
        max_blocks=U32,
        lease_ms=U32,
        owner=WORDS,
    ),
    st.builds(kvstore_pb2.RenewPinRequest, lease_id=WORDS, lease_ms=U32),
    st.builds(kvstore_pb2.ReleasePinRequest, lease_id=WORDS),
    st.builds(
        kvstore_pb2.ReserveRequest,
        fingerprint=FINGERPRINTS,
        block_hashes=HASHES,
        block_bytes=U64,
        owner=WORDS,
    ),
    st.builds(
        kvstore_pb2.CommitRequest,
        reservation_id=WORDS,
        transport=WORDS,
        transport_session=WORDS,
        blocks=SOURCES,
    ),
    st.builds(kvstore_pb2.CancelReservationRequest, reservation_id=WORDS),
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(request=REQUESTS)
def test_no_request_is_answered_with_anything_but_an_answer_or_a_typed_refusal(
    world: World, request: Any
) -> None:
    method = type(request).__name__.removesuffix("Request")
    answer = world.call(method, request)
    assert not isinstance(answer, grpc.StatusCode) or answer in REFUSALS
    world.end_leases()

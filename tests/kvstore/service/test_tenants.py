"""The whole API against malicious tenants: no tenant gets bytes of another.

Tenants share the node, the model and the prompts; only their salts differ. A block's bytes are derived
from its hash, so that the test recognises blocks of another tenant.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from libs.common.block_hash import chain_hashes
from slipstream.block_hashes import HASH_BYTES, pack_hashes, unpack_hashes
from slipstream.v1 import common_pb2, kv_events_pb2, kvstore_pb2
from tests.kvstore.node import FINGERPRINT
from tests.kvstore.service.tenant_world import BLOCK_BYTES, MAX_BLOCKS, MAX_SOURCES, METHODS, World, payload

BLOCK_TOKENS = 4


class Tenants(RuleBasedStateMachine):
    """Two tenants with the same prompts. `stored`: blocks that any tenant put honestly."""

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
    def put_with_false_data(self, who: int, prompt: int, n_blocks: int, lie: str) -> None:
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
            else:  # an address in the node's own memory
                session = self.world.node_transport.session_id
                source.address = self.world.store.dram.memory.address + index * BLOCK_BYTES
            sources.append(source)
        answer = self.world.commit(reserved.reservation_id, sources, session)
        committed = set(unpack_hashes(answer.committed)) - self.stored
        if committed:  # the bytes of a refused put still lay there: what was no lie
            assert lie == "own arena"
            self.stored |= committed
            self.check_pinned(chain, self.world.pin(chain, 0))
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
        self.check_pinned(chain[first_block:], self.world.pin(chain, first_block))

    def check_pinned(self, chain: list[bytes], pinned: Any) -> None:
        """Compare the blocks with what was put, and keep the ticket."""
        for block, block_hash in zip(pinned.blocks, chain, strict=False):
            assert block_hash in self.stored
            assert self.world.read(pinned.transport_session, block) == payload(block_hash)
        if pinned.lease_id:
            self.live.add(pinned.lease_id)
            self.tickets.append((chain, pinned))

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
            assert self.world.command(release=request).HasField("released")
        self.live.discard(lease_id)
        assert self.world.store.pins == len(self.live)  # no other pin ended

    @rule(which=st.integers(0, 1 << 20))
    def replay_a_ticket(self, which: int) -> None:
        """Reads under an old pin find the block's own bytes, or bytes that its checksum refuses."""
        if not self.tickets:
            return
        hashes, pinned = self.tickets[which % len(self.tickets)]
        renewed = self.world.command(renew=kvstore_pb2.RenewPinRequest(lease_id=pinned.lease_id))
        assert (renewed.failure.code == common_pb2.FAILURE_CODE_NOT_FOUND) == (
            pinned.lease_id not in self.live
        )
        for block, block_hash in zip(pinned.blocks, hashes, strict=False):
            found = self.world.read(pinned.transport_session, block)
            assert found == payload(block_hash) or (found is None and pinned.lease_id not in self.live)

    @rule()
    def guess_ids(self) -> None:
        guess = os.urandom(16).hex()
        renew = kvstore_pb2.RenewPinRequest(lease_id=guess, lease_ms=60_000)
        assert self.world.command(renew=renew).failure.code == common_pb2.FAILURE_CODE_NOT_FOUND
        self.world.command(release=kvstore_pb2.ReleasePinRequest(lease_id=guess))
        assert self.world.store.pins == len(self.live)

    @rule(seed=st.integers(0, 1 << 30))
    def flood(self, seed: int) -> None:
        """Evict everything that is not pinned, and reuse its slots."""
        rng = random.Random(seed)
        for _ in range(3):
            hashes = [rng.randbytes(16) for _ in range(MAX_SOURCES)]
            reserved = self.world.reserve(hashes)
            if isinstance(reserved, grpc.StatusCode):
                assert reserved == grpc.StatusCode.RESOURCE_EXHAUSTED
                return
            wanted = unpack_hashes(reserved.wanted)
            self.world.commit(
                reserved.reservation_id,
                [self.world.source(i, h, payload(h)) for i, h in enumerate(wanted)],
            )

    @rule(prompt=st.integers(0, 2), how=st.sampled_from(["swapped", "another's block", "honest"]))
    def pool_returns_wrong_values(self, prompt: int, how: str) -> None:
        """The pool returns another tenant's value under a key, or another block of the same tenant."""
        mine, theirs = ([key.hex() for key in self.chain(who, prompt, MAX_BLOCKS)] for who in (0, 1))
        pairs = list(zip(mine, theirs, strict=True)) if how == "swapped" else list(pairwise(mine))
        given = {} if how == "honest" else {one: other for pair in pairs for one, other in (pair, pair[::-1])}
        self.world.pool.swap = lambda key: given.get(key, key)

    @rule(who=st.integers(0, 1), prompt=st.integers(0, 2), everything=st.booleans())
    def verify(self, who: int, prompt: int, everything: bool) -> None:
        chain = [] if everything else self.chain(who, prompt, MAX_BLOCKS)
        report = self.world.call(
            "VerifyBlocks", kvstore_pb2.VerifyBlocksRequest(block_hashes=pack_hashes(chain))
        )
        assert report.last
        assert not report.corrupt
        assert everything or report.copies <= 2 * len(self.stored.intersection(chain))

    @rule(who=st.integers(0, 1), prompt=st.integers(0, 2))
    def drop(self, who: int, prompt: int) -> None:
        """A drop by one tenant costs no other tenant a block."""
        chain, others = self.chain(who, prompt, MAX_BLOCKS), self.chain(1 - who, prompt, MAX_BLOCKS)
        before = self.held(others)
        self.world.call("DropBlocks", kvstore_pb2.DropBlocksRequest(block_hashes=pack_hashes(chain)))
        self.stored.difference_update(chain)
        assert self.held(chain) == 0
        assert self.held(others) == before

    @rule()
    def watch(self) -> None:
        """A watch reveals hashes, which only routers and operators may see, and never bytes."""
        reported = self.world.call("WatchBlocks", kv_events_pb2.WatchBlocksRequest())
        for piece in reported.snapshot.held:
            assert len(unpack_hashes(piece.block_hashes)) * HASH_BYTES == len(piece.block_hashes)

    def held(self, chain: list[bytes]) -> int:
        request = kvstore_pb2.LookupRequest(fingerprint=FINGERPRINT, block_hashes=pack_hashes(chain))
        return int(self.world.call("Lookup", request).held_blocks)

    def teardown(self) -> None:
        self.world.pool.swap = lambda key: key
        self.world.end_leases()
        assert self.world.store.pins == self.world.puts.reservations == self.world.puts.reserved_blocks == 0
        assert self.world.store.leaked_blocks == 0
        self.world.store.dram.table.check()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    opened = World()
    yield opened
    opened.close()


def test_no_tenant_reads_bytes_of_another(world: World) -> None:
    Tenants.world = world
    bounded = settings(
        max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    for _ in range(4):  # one run in twenty draws a rule never
        run_state_machine_as_test(Tenants, settings=bounded)
        if world.called == set(METHODS):
            break
    assert world.called == set(METHODS)  # a new call needs a rule here

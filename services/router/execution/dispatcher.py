"""One request to its workers: the snapshot, the decision, and what comes of it back into the books."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import msgspec

from libs.common.cluster.placement_record import Placement
from libs.common.cluster.worker_record import Role
from services.router.execution.attempt_types import TokenBatch, WorkerPair
from services.router.placement.policy import place
from services.router.placement.types import HeldTokens, PlacementDecision, PlacementRequest, WorkerCandidate
from services.router.prefix_index.index import PrefixMatch
from services.router.workers.connection import WorkerConnection
from services.router.workers.fleet import RouterFleet
from slipstream.errors import Internal
from slipstream.v1 import common_pb2

# How long an entry made at routing time waits for the worker's own event, beyond the predicted time.
PREDICTED_TTL_S = 5.0
# Decode workers tell nobody what their pages hold after a sequence: a guess of how long it is there.
DECODE_HELD_S = 60.0
# Sequences whose length nobody knows are taken to have this many tokens.
EXPECTED_OUTPUT_TOKENS = 256


class PlacementQuery(msgspec.Struct, frozen=True):
    """A request to place. `hashes`: of the prompt's full blocks; `known_tokens` of them have their KV
    at `session`'s workers, as the session's record says."""

    tenant: str
    fingerprint: common_pb2.Fingerprint
    prompt_tokens: int
    hashes: Sequence[bytes]
    seed: int
    session: Placement
    known_tokens: int = 0
    max_output_tokens: int = EXPECTED_OUTPUT_TOKENS
    without: Set[str] = frozenset()
    pinned_prefill: str = ""
    may_skip_prefill: bool = False


@dataclass(slots=True)
class Assignment:
    """A request's workers, and its memory of what was expected of them."""

    workers: WorkerPair
    decision: PlacementDecision
    _ask: PlacementQuery
    _chosen_s: float
    _fleet: RouterFleet

    def note_begun(self) -> None:
        """The attempt begins. To be called in the iteration of the event loop in which the workers were
        chosen: the next placement has to know of it before the workers' reports do."""
        fleet, ask, cost = self._fleet, self._ask, self.decision.cost
        prefill = self.workers.prefill
        if prefill is not None and self.decision.cold:
            fleet.spread.placed(prefill.key)
        computes = prefill or self.workers.decode
        predicted_s = (cost.queue_ms + cost.prefill_ms + cost.load_ms) / 1e3
        fleet.index.predict(
            computes.key,
            ask.hashes,
            tenant=ask.tenant,
            now_s=self._chosen_s,
            ttl_s=PREDICTED_TTL_S + 2 * predicted_s,
        )

    def observe(self, batch: TokenBatch) -> None:
        """Tokens came: their times correct the models of the workers."""
        prefill, book = self.workers.prefill, self._fleet.book
        if batch.prefill_ms is not None and prefill is not None:
            cached = {item.tier: item.tokens for item in batch.cached or ()}
            leg = self._prefill_leg()
            book.observe_prefill(
                prefill.key,
                ahead_tokens=leg.ahead_tokens,
                ahead_requests=leg.ahead_requests,
                longer_tokens=leg.longer_tokens,
                uncached_tokens=max(self._ask.prompt_tokens - sum(cached.values()), 1),
                prompt_tokens=self._ask.prompt_tokens,
                dram_tokens=cached.get(common_pb2.CACHE_TIER_DRAM, 0),
                nvme_tokens=cached.get(common_pb2.CACHE_TIER_NVME, 0)
                + cached.get(common_pb2.CACHE_TIER_POOL, 0),
                peer_tokens=cached.get(common_pb2.CACHE_TIER_PEER, 0),
                duration_ms=batch.prefill_ms,
            )
        if batch.stats is not None and batch.stats.kv_bytes_pulled and prefill is not None:
            book.observe_pull(
                self.workers.decode.key,
                n_bytes=batch.stats.kv_bytes_pulled,
                transfer_ms=batch.stats.transfer_ms,
            )

    def _prefill_leg(self) -> WorkerCandidate:
        for leg in self.decision.legs:
            if leg.instance == self.decision.prefill:
                return leg
        raise Internal(f"prefill worker {self.decision.prefill} was chosen and not weighed")


class Dispatcher:
    """Decides by what the fleet's books and the prefix index say."""

    def __init__(self, fleet: RouterFleet, *, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock

    def choose(self, ask: PlacementQuery) -> Assignment:
        """Workers for one attempt; `note_begun` is to follow. Raises Unavailable."""
        now_s = self._clock()
        fleet = self._fleet.loads(ask.fingerprint, without=ask.without)
        decision = place(self._request(ask, now_s), fleet)
        prefill = self._link(Role.PREFILL, decision.prefill)
        decode = self._fleet.find(Role.DECODE, decision.decode)
        kvstore = self._link(Role.KVSTORE, decision.kvstore)
        peer = self._link(Role.PREFILL, decision.peer)
        if decode is None:
            raise Internal(f"decode worker {decision.decode} was chosen and is not there")
        workers = WorkerPair(
            prefill=prefill,
            decode=decode,
            decode_stream=self._fleet.decode_stream(decode),
            kvstore_endpoint=kvstore.worker.endpoint if kvstore is not None else "",
            peer_endpoint=peer.worker.endpoint if peer is not None else "",
            uncached_tokens=decision.uncached_tokens,
        )
        return Assignment(workers, decision, ask, now_s, self._fleet)

    def ended(self, assignment: Assignment, hashes: Sequence[bytes], *, tenant: str) -> None:
        """The sequence ran to its end: its decode worker holds the KV of these blocks for a while."""
        self._fleet.index.predict(
            assignment.workers.decode.key, hashes, tenant=tenant, now_s=self._clock(), ttl_s=DECODE_HELD_S
        )

    def _request(self, ask: PlacementQuery, now_s: float) -> PlacementRequest:
        block_tokens = ask.fingerprint.block_tokens
        index, session, known_tokens = self._fleet.index, ask.session, ask.known_tokens
        found = index.find(ask.hashes, tenant=ask.tenant, now_s=now_s)
        prefill_held: dict[str, int] = {}
        told: dict[str, int] = {}
        for link in self._fleet.links_of(Role.PREFILL):
            instance = link.worker.instance
            prefill_held[instance] = found.blocks(link.key) * block_tokens
            if index.knows(link.key):
                told[instance] = found.blocks(link.key, tier=common_pb2.CACHE_TIER_WORKER) * block_tokens
            elif instance == session.prefill:
                # The session's record stands in for a worker that has not told what it holds.
                prefill_held[instance] = max(prefill_held[instance], known_tokens)
        decode_held: dict[str, int] = {}
        for link in self._fleet.links_of(Role.DECODE):
            instance = link.worker.instance
            decode_held[instance] = found.blocks(link.key) * block_tokens
            if instance == session.decode and not index.knows(link.key):
                decode_held[instance] = max(decode_held[instance], known_tokens)
        return PlacementRequest(
            prompt_tokens=ask.prompt_tokens,
            seed=ask.seed,
            fingerprint=ask.fingerprint.digest.hex(),
            output_tokens=max(1, min(ask.max_output_tokens, EXPECTED_OUTPUT_TOKENS)),
            prefill_held=prefill_held,
            prefill_told=told,
            prefill_lent=told,
            decode_held=decode_held,
            store_held=self._held_in_stores(ask, found),
            content_key=ask.hashes[0] if ask.hashes else b"",
            pinned_prefill=ask.pinned_prefill,
            may_skip_prefill=ask.may_skip_prefill,
        )

    def _held_in_stores(self, ask: PlacementQuery, found: PrefixMatch) -> dict[str, HeldTokens]:
        block_tokens, index = ask.fingerprint.block_tokens, self._fleet.index
        held: dict[str, HeldTokens] = {}
        for link in self._fleet.links_of(Role.KVSTORE):
            instance = link.worker.instance
            if index.knows(link.key):
                in_memory = found.blocks(link.key, tier=common_pb2.CACHE_TIER_DRAM)
                held[instance] = HeldTokens(found.blocks(link.key) * block_tokens, in_memory * block_tokens)
            else:
                tokens = ask.known_tokens if instance == ask.session.kvstore else 0
                held[instance] = HeldTokens(tokens, tokens)
        return held

    def _link(self, role: Role, instance: str) -> WorkerConnection | None:
        return self._fleet.find(role, instance) if instance else None

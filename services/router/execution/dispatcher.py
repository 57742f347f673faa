"""Chooses the workers of a request, and reports its times and its blocks to the models and the index."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import msgspec

from libs.common.cluster.placement_record import Placement
from libs.common.cluster.worker_record import Role
from services.router.execution.attempt_types import TokenBatch, WorkerPair
from services.router.execution.policies.context_room import ContextRoom
from services.router.placement.cost_model import PrefillReport
from services.router.placement.policy import place
from services.router.placement.types import HeldTokens, PlacementDecision, PlacementRequest
from services.router.prefix_index.index import PrefixMatch
from services.router.workers.connection import WorkerConnection
from services.router.workers.fleet import RouterFleet
from slipstream.errors import Internal
from slipstream.v1 import common_pb2

# How long an entry made at routing time waits for the worker's own event, beyond the predicted time.
PREDICTED_TTL_S = 5.0
# Decode workers do not report the blocks that they keep after a sequence: how long they are predicted there.
DECODE_HELD_S = 60.0
# The expected length of an answer is at most this.
EXPECTED_OUTPUT_TOKENS = 256


class PlacementQuery(msgspec.Struct, frozen=True):
    """A request to place. `hashes`: of the prompt's full blocks; `known_tokens` of them have their KV
    at `session`'s workers, as the session's record says. `room`: the context that its workers must take."""

    tenant: str
    fingerprint: common_pb2.Fingerprint
    prompt_tokens: int
    hashes: Sequence[bytes]
    seed: int
    session: Placement
    known_tokens: int = 0
    max_output_tokens: int = EXPECTED_OUTPUT_TOKENS
    without: Set[str] = frozenset()
    requested_prefill: str = ""
    may_skip_prefill: bool = False
    room: ContextRoom = ContextRoom()


@dataclass(slots=True)
class Assignment:
    """A request's workers, and what the decision predicted of them."""

    workers: WorkerPair
    decision: PlacementDecision
    _query: PlacementQuery
    _chosen_s: float
    _fleet: RouterFleet

    def note_begun(self) -> None:
        """Predict the prompt's blocks on the worker that computes it. To be called in the iteration of the
        event loop in which the workers were chosen: the next placement needs it before any report comes."""
        fleet, query, cost = self._fleet, self._query, self.decision.cost
        prefill = self.workers.prefill
        if prefill is not None and self.decision.cold:
            fleet.cold_round_robin.placed(prefill.key)
        computes = prefill or self.workers.decode
        predicted_s = (cost.queue_ms + cost.prefill_ms + cost.load_ms) / 1e3
        fleet.index.predict(
            computes.key,
            query.hashes,
            tenant=query.tenant,
            now_s=self._chosen_s,
            ttl_s=PREDICTED_TTL_S + 2 * predicted_s,
        )

    def observe(self, batch: TokenBatch) -> None:
        """Correct the models of the workers by the times of these tokens."""
        prefill, models = self.workers.prefill, self._fleet.worker_models
        if batch.prefill_ms is not None and prefill is not None:
            cached = {item.tier: item.tokens for item in batch.cached or ()}
            predicted = self.decision.chosen[0]
            report = PrefillReport(
                duration_ms=batch.prefill_ms,
                uncached_tokens=max(self._query.prompt_tokens - sum(cached.values()), 1),
                prompt_tokens=self._query.prompt_tokens,
                ahead_tokens=predicted.ahead_tokens,
                ahead_requests=predicted.ahead_requests,
                longer_tokens=predicted.longer_tokens,
                dram_tokens=cached.get(common_pb2.CACHE_TIER_DRAM, 0),
                nvme_tokens=cached.get(common_pb2.CACHE_TIER_NVME, 0)
                + cached.get(common_pb2.CACHE_TIER_POOL, 0),
                peer_tokens=cached.get(common_pb2.CACHE_TIER_PEER, 0),
            )
            models.observe_prefill(prefill.key, report)
        if batch.stats is not None and batch.stats.kv_bytes_pulled and prefill is not None:
            models.observe_pull(
                self.workers.decode.key,
                n_bytes=batch.stats.kv_bytes_pulled,
                transfer_ms=batch.stats.transfer_ms,
            )


class Dispatcher:
    """Places requests by the loads of the fleet and by the prefix index."""

    def __init__(self, fleet: RouterFleet, *, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._clock = clock

    def choose(self, query: PlacementQuery) -> Assignment:
        """Workers for one attempt; `note_begun` is to follow. Raises Unavailable."""
        now_s = self._clock()
        room = query.room
        needed = {Role.PREFILL: room.prefill_tokens, Role.DECODE: room.decode_tokens}
        fleet = self._fleet.loads(without=query.without, context_tokens=needed)
        decision = place(self.request(query, now_s), fleet)
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
        return Assignment(workers, decision, query, now_s, self._fleet)

    def ended(self, assignment: Assignment, hashes: Sequence[bytes], *, tenant: str) -> None:
        """Predict the blocks of a finished sequence on its decode worker for a while."""
        self._fleet.index.predict(
            assignment.workers.decode.key, hashes, tenant=tenant, now_s=self._clock(), ttl_s=DECODE_HELD_S
        )

    def request(self, query: PlacementQuery, now_s: float) -> PlacementRequest:
        """The input of placement for a request: the query, and how much of its prompt each holder has."""
        block_tokens = query.fingerprint.block_tokens
        index, session, known_tokens = self._fleet.index, query.session, query.known_tokens
        found = index.find(query.hashes, tenant=query.tenant, now_s=now_s)
        expected: dict[str, int] = {}
        confirmed: dict[str, int] = {}
        for link in self._fleet.links_of(Role.PREFILL):
            instance, key = link.worker.instance, link.key
            expected[instance] = found.blocks(key) * block_tokens
            if index.knows(key):
                confirmed[instance] = found.blocks(key, tier=common_pb2.CACHE_TIER_WORKER) * block_tokens
            elif instance == session.prefill:
                # The session's record stands in for the reports of a worker that has sent none.
                expected[instance] = max(expected[instance], known_tokens)
        decode_expected: dict[str, int] = {}
        for link in self._fleet.links_of(Role.DECODE):
            instance = link.worker.instance
            decode_expected[instance] = found.blocks(link.key) * block_tokens
            if instance == session.decode and not index.knows(link.key):
                decode_expected[instance] = max(decode_expected[instance], known_tokens)
        return PlacementRequest(
            prompt_tokens=query.prompt_tokens,
            seed=query.seed,
            fingerprint=query.fingerprint.digest.hex(),
            output_tokens=max(1, min(query.max_output_tokens, EXPECTED_OUTPUT_TOKENS)),
            prefill_expected_tokens=expected,
            prefill_confirmed_tokens=confirmed,
            prefill_lendable_tokens=confirmed,
            decode_expected_tokens=decode_expected,
            store_held=self._held_in_stores(query, found),
            content_key=query.hashes[0] if query.hashes else b"",
            requested_prefill=query.requested_prefill,
            may_skip_prefill=query.may_skip_prefill,
        )

    def _held_in_stores(self, query: PlacementQuery, found: PrefixMatch) -> dict[str, HeldTokens]:
        block_tokens, index = query.fingerprint.block_tokens, self._fleet.index
        held: dict[str, HeldTokens] = {}
        for link in self._fleet.links_of(Role.KVSTORE):
            instance = link.worker.instance
            if index.knows(link.key):
                in_memory = found.blocks(link.key, tier=common_pb2.CACHE_TIER_DRAM)
                held[instance] = HeldTokens(found.blocks(link.key) * block_tokens, in_memory * block_tokens)
            else:
                tokens = query.known_tokens if instance == query.session.kvstore else 0
                held[instance] = HeldTokens(tokens, tokens)
        return held

    def _link(self, role: Role, instance: str) -> WorkerConnection | None:
        return self._fleet.find(role, instance) if instance else None

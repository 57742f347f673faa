"""The rules that are compared: the router's own decision code, and what else is in use."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

from bench.placement.model import KV_BYTES_PER_TOKEN, Run
from bench.placement.prefill import STORE
from bench.placement.sim import Policy, Simulation
from bench.placement.trace import BLOCK_TOKENS
from services.router.execution.dispatcher import EXPECTED_OUTPUT_TOKENS, PREDICTED_TTL_S
from services.router.placement.cost_model import PrefillReport
from services.router.placement.policy import place
from services.router.placement.round_robin import ColdRoundRobin
from services.router.placement.types import (
    DecodeWorker,
    HeldTokens,
    KvStore,
    PlacementDecision,
    PlacementFleet,
    PlacementRequest,
    PrefillWorker,
    WorkerCandidate,
)
from services.router.placement.worker_models import WorkerModels
from services.router.prefix_index.index import PrefixIndex
from slipstream.v1 import common_pb2

EVENT_DELAY_MS = 20.0  # a worker's events on their way to the router
REPORT_DELAY_MS = 50.0  # load of the other routers' requests, as workers report it
_STORE_NAME = "store"


class _Deaf:
    """A rule that needs to hear nothing."""

    def computed(self, run: Run, sim: Simulation) -> None:
        return

    def blocks_changed(
        self, worker: int, new: Sequence[bytes], evicted: Sequence[bytes], now_ms: float
    ) -> None:
        return


class RoundRobin(_Deaf):
    """One after the other."""

    name = "round robin"

    def __init__(self) -> None:
        self._turn = itertools.count()

    def choose(self, run: Run, sim: Simulation) -> tuple[int, int]:
        turn = next(self._turn)
        return turn % len(sim.prefill), turn % len(sim.decode)


def _least(loads: Sequence[int]) -> int:
    return min(range(len(loads)), key=loads.__getitem__)


def _least_prefill(sim: Simulation) -> int:
    return _least([node.queued_tokens() for node in sim.prefill])


def _least_decode(sim: Simulation) -> int:
    return _least([node.assigned_tokens for node in sim.decode])


class LeastLoad(_Deaf):
    """The fewest tokens in flight, known exactly."""

    name = "least load"

    def choose(self, run: Run, sim: Simulation) -> tuple[int, int]:
        return _least_prefill(sim), _least_decode(sim)


class SessionHash(_Deaf):
    """A session always goes to the same worker."""

    name = "session hash"

    def choose(self, run: Run, sim: Simulation) -> tuple[int, int]:
        digest = hashlib.blake2b(run.request.session.encode(), digest_size=16).digest()
        return (
            int.from_bytes(digest[:8], "little") % len(sim.prefill),
            int.from_bytes(digest[8:], "little") % len(sim.decode),
        )


class PrefixAware(_Deaf):
    """The worker that holds most of the prompt if it holds more than half, else the least loaded one; all
    known exactly and at once. SGLang's cache-aware rule with its default threshold."""

    name = "prefix-aware"

    def choose(self, run: Run, sim: Simulation) -> tuple[int, int]:
        held = [node.cache.prefix_blocks(run.request.hashes) for node in sim.prefill]
        best = max(range(len(held)), key=held.__getitem__)
        if held[best] * BLOCK_TOKENS > 0.5 * run.request.prompt_tokens:
            return best, _least_decode(sim)
        return _least_prefill(sim), _least_decode(sim)


class LendingRule:
    """Another rule, whose workers read KV from the one that holds most, if that is more: known exactly."""

    def __init__(self, rule: Policy) -> None:
        self._rule = rule
        self.name = f"{rule.name}, caches lent"

    def choose(self, run: Run, sim: Simulation) -> tuple[int, int]:
        prefill, decode = self._rule.choose(run, sim)
        held = [node.cache.prefix_blocks(run.request.hashes) for node in sim.prefill]
        most = max(range(len(held)), key=held.__getitem__)
        run.peer = most if held[most] > held[prefill] else None
        return prefill, decode

    def computed(self, run: Run, sim: Simulation) -> None:
        self._rule.computed(run, sim)

    def blocks_changed(
        self, worker: int, new: Sequence[bytes], evicted: Sequence[bytes], now_ms: float
    ) -> None:
        self._rule.blocks_changed(worker, new, evicted, now_ms)


class Slipstream:
    """The router's `place` with its index, models and round robin, in `n_routers` routers that share nothing.

    Requests go to the routers in turn. What a worker holds is heard of EVENT_DELAY_MS later; the requests
    of the other routers REPORT_DELAY_MS later; how fast workers are is learnt from first tokens. `lends`:
    whether prefill workers say that they lend their caches.
    """

    name = "slipstream"

    def __init__(self, n_routers: int = 1, *, lends: bool = True) -> None:
        if n_routers > 1:
            self.name = f"slipstream, {n_routers} routers"
        if not lends:
            self.name = "slipstream, nothing lent"
        self._routers = [_Router(lends=lends) for _ in range(n_routers)]
        self._sim: Simulation | None = None

    def choose(self, run: Run, sim: Simulation) -> tuple[int, int]:
        self._sim = sim
        return self._router_of(run).choose(run, sim, others=len(self._routers) > 1)

    def computed(self, run: Run, sim: Simulation) -> None:
        self._router_of(run).computed(run, sim)

    def blocks_changed(
        self, worker: int, new: Sequence[bytes], evicted: Sequence[bytes], now_ms: float
    ) -> None:
        assert self._sim is not None

        def report() -> None:
            for router in self._routers:
                router.blocks_changed(worker, new, evicted)

        self._sim.at(now_ms + EVENT_DELAY_MS, report)

    def _router_of(self, run: Run) -> _Router:
        return self._routers[run.request.number % len(self._routers)]


class _Router:
    """What one router knows."""

    def __init__(self, *, lends: bool) -> None:
        self._lends = lends
        self._index = PrefixIndex()
        self._book = WorkerModels()
        self._decayed_s = 0.0
        self._cold_round_robin = ColdRoundRobin()
        self._mine: dict[int, tuple[Run, WorkerCandidate]] = {}  # prompts sent and not computed, by number

    def choose(self, run: Run, sim: Simulation, *, others: bool) -> tuple[int, int]:
        request, now_s = run.request, sim.now_ms / 1e3
        self._book.decay(now_s - self._decayed_s)
        self._decayed_s = now_s
        names = [f"p{i}" for i in range(len(sim.prefill))]

        found = self._index.find(request.hashes, tenant="", now_s=now_s)

        def tokens(holder: str, *, tier: int | None = None) -> int:
            return found.blocks(holder, tier=tier) * BLOCK_TOKENS

        stored = tokens(_STORE_NAME)
        confirmed = {name: tokens(name, tier=common_pb2.CACHE_TIER_WORKER) for name in names}
        wish = PlacementRequest(
            request.prompt_tokens,
            seed=request.number,
            output_tokens=EXPECTED_OUTPUT_TOKENS,
            prefill_expected_tokens={name: tokens(name) for name in names},
            prefill_confirmed_tokens=confirmed,
            prefill_lendable_tokens=confirmed if self._lends else {},
            store_held={_STORE_NAME: HeldTokens(stored, stored)},
            content_key=request.hashes[0] if request.hashes else b"",
        )
        decision = place(wish, self._fleet(sim, others=others))
        self._remember(run, decision, now_s)
        run.expected_uncached = decision.uncached_tokens
        run.peer = int(decision.peer[1:]) if decision.peer else None
        return int(decision.prefill[1:]), int(decision.decode[1:])

    def _remember(self, run: Run, decision: PlacementDecision, now_s: float) -> None:
        if decision.cold:
            self._cold_round_robin.placed(decision.prefill)
        wait_s = (decision.cost.queue_ms + decision.cost.prefill_ms + decision.cost.load_ms) / 1e3
        self._index.predict(
            decision.prefill,
            run.request.hashes,
            tenant="",
            now_s=now_s,
            ttl_s=PREDICTED_TTL_S + 2 * wait_s,
        )
        self._mine[run.request.number] = (run, decision.chosen[0])

    def computed(self, run: Run, sim: Simulation) -> None:
        _, predicted = self._mine.pop(run.request.number)
        from_peer = run.read_tokens if run.peer is not None else 0
        report = PrefillReport(
            duration_ms=run.first_token_ms - run.sent_ms,
            uncached_tokens=run.uncached_tokens,
            prompt_tokens=run.request.prompt_tokens,
            ahead_tokens=predicted.ahead_tokens,
            ahead_requests=predicted.ahead_requests,
            longer_tokens=predicted.longer_tokens,
            dram_tokens=run.read_tokens - from_peer,
            peer_tokens=from_peer,
        )
        self._book.observe_prefill(f"p{run.prefill}", report)
        node = sim.decode[run.decode]
        self._book.observe_step(
            f"d{run.decode}",
            sequences=node.sequences,
            context_tokens=int(node.context),
            step_ms=node.step_ms(),
        )
        n_bytes = run.request.prompt_tokens * KV_BYTES_PER_TOKEN
        self._book.observe_pull(
            f"d{run.decode}", n_bytes=n_bytes, transfer_ms=sim.hardware.decode.transfer_ms(n_bytes)
        )

    def blocks_changed(self, worker: int, new: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        name, tier = f"p{worker}", common_pb2.CACHE_TIER_WORKER
        if worker == STORE:
            name, tier = _STORE_NAME, common_pb2.CACHE_TIER_DRAM
        view = self._index.view(name)
        view.stored(tier, new)
        view.removed(tier, evicted)

    def _fleet(self, sim: Simulation, *, others: bool) -> PlacementFleet:
        prefill = tuple(self._prefill_worker(sim, i, others=others) for i in range(len(sim.prefill)))
        decode = tuple(
            DecodeWorker(
                f"d{i}",
                context_tokens=node.assigned_tokens,
                sequences=node.assigned,
                max_sequences=sim.hardware.max_sequences,
                block_tokens=BLOCK_TOKENS,
                block_bytes=BLOCK_TOKENS * KV_BYTES_PER_TOKEN,
                model=self._book.decode_model(f"d{i}"),
            )
            for i, node in enumerate(sim.decode)
        )
        stores = (KvStore(_STORE_NAME),) if sim.store is not None else ()
        return PlacementFleet(prefill, decode, stores)

    def _prefill_worker(self, sim: Simulation, i: int, *, others: bool) -> PrefillWorker:
        node = sim.prefill[i]
        tokens, requests, queue = sum(node.queue()), node.requests, node.queue()
        if others:
            own = [run.request.number in self._mine for run in node.line]
            hidden = [
                run
                for run, is_own in zip(node.line, own, strict=True)
                if not is_own and run.sent_ms > sim.now_ms - REPORT_DELAY_MS
            ]
            tokens = max(tokens - sum(run.tokens_left for run in hidden), 0)
            requests -= len(hidden)
            queue = [left for left, is_own in zip(queue, own, strict=True) if is_own]
        return PrefillWorker(
            f"p{i}",
            queued_tokens=tokens,
            queued_requests=requests,
            queue=tuple(queue),
            last_cold=self._cold_round_robin.last_number(f"p{i}"),
            model=self._book.prefill_model(f"p{i}"),
        )

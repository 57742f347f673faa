"""Tiers of simulated workers that start, drain and cost hours, and the requests that they serve.

Prefill workers compute prompts in order, the one with the shortest queue first; all read one shared cache.
Decode workers are those of the placement simulation. A new worker serves after `START_MS`, and costs from
its creation on. A worker that is removed takes no new work and costs until it is idle.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from bench.placement.cache import LruCache
from bench.placement.decode import DecodeNode
from bench.placement.model import KV_BYTES_PER_TOKEN, Hardware, Run
from bench.placement.trace import BLOCK_TOKENS, TraceRequest
from libs.common.cluster.worker_record import Role

START_MS = 180_000.0
_SHARED_BLOCKS = 30_000
TIERS = (Role.PREFILL, Role.DECODE)


@dataclass(slots=True, eq=False)
class PrefillLine:
    """A prefill worker: when its queue ends, and what it did."""

    free_ms: float = 0.0
    busy_ms: float = 0.0  # of all prompts accepted so far
    queue: list[tuple[float, int, float]] = field(default_factory=list)  # (end, tokens, duration)

    def send(self, now_ms: float, tokens: int, duration_ms: float) -> float:
        """A prompt; returns when it is computed."""
        self.free_ms = max(self.free_ms, now_ms) + duration_ms
        self.busy_ms += duration_ms
        self.queue.append((self.free_ms, tokens, duration_ms))
        return self.free_ms

    def tokens_left(self, now_ms: float) -> float:
        """The tokens of all prompts in the queue."""
        while self.queue and self.queue[0][0] <= now_ms:
            self.queue.pop(0)
        return sum(tokens * min((end - now_ms) / took, 1.0) for end, tokens, took in self.queue)

    def requests(self, now_ms: float) -> int:
        """Prompts in the queue, the one that is computed included."""
        self.tokens_left(now_ms)
        return len(self.queue)

    def done_ms(self, now_ms: float) -> float:
        """Time computed so far."""
        return self.busy_ms - max(self.free_ms - now_ms, 0.0)


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """A worker of a tier and its lifetime."""

    node: PrefillLine | DecodeNode
    created_ms: float
    ready_ms: float
    removed_ms: float | None = None
    done_before_ms: float = 0.0  # of a prefill worker, at the last look


class ScalingRule(Protocol):
    """Decides the size of each tier."""

    name: str
    period_ms: float

    def decide(self, fleet: SimulatedFleet) -> dict[Role, int]:
        """The replicas that each tier should have now."""


class SimulatedFleet:
    """The fleet, one rule, one day."""

    def __init__(self, hardware: Hardware, rule: ScalingRule, *, sizes: dict[Role, int]) -> None:
        self.hardware = hardware
        self.now_ms = 0.0
        self.arrived_tokens = self.arrived_uncached = self.arrived_output = self.arrived = 0
        self.runs: list[Run] = []
        self.changes = 0
        self.sizes: dict[Role, list[int]] = {role: [] for role in TIERS}
        self._rule = rule
        self._cache = LruCache(_SHARED_BLOCKS)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._workers: dict[Role, list[SimulatedWorker]] = {role: [] for role in TIERS}
        self._retired: dict[Role, list[SimulatedWorker]] = {role: [] for role in TIERS}
        for role, n in sizes.items():
            self.resize(role, n, start_ms=0.0)

    # ---- the tiers

    def replicas(self, role: Role) -> int:
        """The replicas that serve or start."""
        return len(self._workers[role])

    def serving(self, role: Role) -> list[SimulatedWorker]:
        """The replicas that serve."""
        return [worker for worker in self._workers[role] if worker.ready_ms <= self.now_ms]

    def resize(self, role: Role, n: int, *, start_ms: float = START_MS) -> None:
        """Start or remove workers; the last ones go."""
        workers = self._workers[role]
        self.changes += n != len(workers)
        while len(workers) < n:
            node = PrefillLine() if role is Role.PREFILL else DecodeNode(self)
            workers.append(SimulatedWorker(node, self.now_ms, self.now_ms + start_ms))
        while len(workers) > n:
            workers[-1].removed_ms = self.now_ms
            self._retired[role].append(workers.pop())

    def hours(self, role: Role) -> float:
        """Worker hours until now."""
        total_ms = 0.0
        for worker in (*self._workers[role], *self._retired[role]):
            end_ms = self.now_ms
            if worker.removed_ms is not None:
                end_ms = worker.removed_ms
                if isinstance(worker.node, PrefillLine):
                    end_ms = max(end_ms, min(worker.node.free_ms, self.now_ms))
                else:
                    end_ms = max(end_ms, worker.node.idle_ms)
            total_ms += end_ms - worker.created_ms
        return total_ms / 3.6e6

    # ---- the day

    def at(self, time_ms: float, event: Callable[[], None]) -> None:
        """Run `event` then."""
        heapq.heappush(self._events, (time_ms, next(self._numbers), event))

    def run(self, requests: Iterable[TraceRequest], *, until_ms: float) -> None:
        """Serve all requests of the day."""
        self.at(0.0, self._decide)
        for request in requests:
            self._run_until(request.at_ms)
            self.now_ms = request.at_ms
            self._arrive(request)
        self._run_until(until_ms)
        self.now_ms = until_ms

    def _run_until(self, time_ms: float) -> None:
        while self._events and self._events[0][0] <= time_ms:
            self.now_ms, _, event = heapq.heappop(self._events)
            event()

    def _decide(self) -> None:
        for role, n in self._rule.decide(self).items():
            self.resize(role, n)
        for role in TIERS:
            self.sizes[role].append(self.replicas(role))
        self.at(self.now_ms + self._rule.period_ms, self._decide)

    def _arrive(self, request: TraceRequest) -> None:
        run = Run(request)
        self.runs.append(run)
        cached = self._cache.prefix_blocks(request.hashes) * BLOCK_TOKENS
        run.cached_tokens = min(cached, request.prompt_tokens - 1)
        self._cache.put(request.hashes)
        self.arrived += 1
        self.arrived_tokens += request.prompt_tokens
        self.arrived_uncached += run.uncached_tokens
        self.arrived_output += request.output_tokens
        duration_ms = self.hardware.prefill.compute_ms(run.uncached_tokens, request.prompt_tokens)
        lines = [worker.node for worker in self.serving(Role.PREFILL)]
        line = min((each for each in lines if isinstance(each, PrefillLine)), key=lambda each: each.free_ms)
        run.first_token_ms = line.send(self.now_ms, run.uncached_tokens, duration_ms)
        self.at(run.first_token_ms, lambda: self._to_decode(run))

    def _to_decode(self, run: Run) -> None:
        if run.request.output_tokens <= 1:
            run.done_ms = self.now_ms
            return
        nodes = [worker.node for worker in self.serving(Role.DECODE)]
        node = min(
            (each for each in nodes if isinstance(each, DecodeNode)), key=lambda each: each.assigned_tokens
        )
        node.expect(run)
        pull_ms = self.hardware.decode.transfer_ms(run.request.prompt_tokens * KV_BYTES_PER_TOKEN)
        self.at(self.now_ms + pull_ms, lambda: node.join(run))

"""Prefill and decode workers on a virtual clock, for any rule that places requests.

A prefill worker computes prompts one after the other and keeps blocks in an LRU cache; what of a prompt is
cached is settled when its turn comes. A decode worker runs all its sequences in one batch whose step grows
with the number of sequences and their context; between two events the batch is the same, so the steps in
between have a closed form and need no loop. Times carry a few percent of seeded noise.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bench.placement_trace import BLOCK_TOKENS, LruCache, TraceRequest
from services.router.cost_model import DecodeModel, PrefillModel

KV_BYTES_PER_TOKEN = 61 * 576 * 2  # Kimi K2.5: 61 layers of 576 values, bfloat16


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the workers of the simulation are. Defaults: one 8-GPU node a worker, without wide expert
    parallelism; prefill 6.7k tokens/s at short context, a decode step of 12 ms when idle."""

    n_prefill: int = 8
    n_decode: int = 8
    cache_blocks: int = 4_000  # of each prefill worker; 2 M tokens = 144 GB of K2.5's latents
    decode_tokens: int = 4_000_000  # KV room of each decode worker
    max_sequences: int = 256
    max_waiting: int = 256  # prompts in a prefill worker's line; more are rejected
    prefill: PrefillModel = field(
        default_factory=lambda: PrefillModel(
            request_ms=15.0, token_ms=0.15, attention_ms=0.00075, dram_token_ms=0.004, nvme_token_ms=0.02
        )
    )
    decode: DecodeModel = field(
        default_factory=lambda: DecodeModel(
            step_base_ms=12.0, sequence_ms=0.15, context_ms=0.02, pull_ms=2.0, pull_mib_ms=0.04
        )
    )
    noise: float = 0.05


@dataclass(slots=True, eq=False)
class Run:
    """A request on its way."""

    request: TraceRequest
    prefill: int = -1
    decode: int = -1
    cached_tokens: int = 0
    queued_tokens: int = 0  # ahead of it when it was sent
    queued_requests: int = 0
    expected_uncached: int = 0  # what the rule counts for it until its turn comes
    sent_ms: float = 0.0
    first_token_ms: float = math.inf
    done_ms: float = math.inf
    rejected: bool = False

    @property
    def uncached_tokens(self) -> int:
        """To compute."""
        return self.request.prompt_tokens - self.cached_tokens

    @property
    def ttft_ms(self) -> float:
        """Time to first token."""
        return self.first_token_ms - self.request.at_ms

    @property
    def tpot_ms(self) -> float:
        """Mean time per token after the first."""
        return (self.done_ms - self.first_token_ms) / max(self.request.output_tokens - 1, 1)


class Policy(Protocol):
    """A rule that places requests. It is told what a router would hear."""

    name: str

    def choose(self, run: Run, sim: Simulation) -> tuple[int, int]:
        """(prefill worker, decode worker) for the request, now."""

    def computed(self, run: Run, sim: Simulation) -> None:
        """The first token came."""

    def blocks_changed(
        self, worker: int, new: Sequence[bytes], evicted: Sequence[bytes], now_ms: float
    ) -> None:
        """A prefill worker's cache has changed."""


class PrefillNode:
    """One prefill worker."""

    def __init__(self, number: int, sim: Simulation) -> None:
        self.number = number
        self.cache = LruCache(sim.hardware.cache_blocks)
        self.busy_ms = 0.0
        self.line: deque[Run] = deque()
        self.current: Run | None = None
        self._sim = sim
        self._began_ms = 0.0
        self._takes_ms = 0.0

    def queued_tokens(self, now_ms: float) -> int:
        """Not computed yet, as the router counts them."""
        tokens = sum(run.expected_uncached for run in self.line)
        if self.current is not None:
            left = 1 - (now_ms - self._began_ms) / self._takes_ms
            tokens += int(self.current.uncached_tokens * max(left, 0.0))
        return tokens

    @property
    def requests(self) -> int:
        """In line or computed now."""
        return len(self.line) + (self.current is not None)

    def send(self, run: Run) -> None:
        """A prompt comes."""
        self.line.append(run)
        if self.current is None:
            self._next()

    def _next(self) -> None:
        if not self.line:
            return
        sim = self._sim
        run = self.current = self.line.popleft()
        held = self.cache.prefix_blocks(run.request.hashes) * BLOCK_TOKENS
        run.cached_tokens = min(held, run.request.prompt_tokens - 1)
        self._began_ms = sim.now_ms
        self._takes_ms = sim.noisy(
            sim.hardware.prefill.compute_ms(run.uncached_tokens, run.request.prompt_tokens)
        )
        self.busy_ms += self._takes_ms
        sim.at(sim.now_ms + self._takes_ms, self._computed)

    def _computed(self) -> None:
        sim, run = self._sim, self.current
        assert run is not None
        run.first_token_ms = sim.now_ms
        self.current = None
        new, evicted = self.cache.put(run.request.hashes)
        sim.policy.blocks_changed(self.number, new, evicted, sim.now_ms)
        sim.policy.computed(run, sim)
        sim.computed(run)
        self._next()


class DecodeNode:
    """One decode worker: a batch whose members all advance by one token a step."""

    def __init__(self, sim: Simulation) -> None:
        self._sim = sim
        self.assigned_tokens = 0  # prompts and room for answers, from the time of routing on
        self.assigned = 0
        self.context = 0.0  # of the batch
        self._ends: list[tuple[float, int, Run]] = []  # by the step count at which a sequence is done
        self._steps = 0.0
        self._at_ms = 0.0
        self._line: deque[Run] = deque()
        self._version = 0

    @property
    def sequences(self) -> int:
        """In the batch."""
        return len(self._ends)

    def step_ms(self) -> float:
        """How long a step takes now."""
        return self._sim.hardware.decode.step_ms(self.sequences, int(self.context))

    def join(self, run: Run) -> None:
        """The sequence's KV is here."""
        self._advance()
        self._line.append(run)
        self._admit()

    def _admit(self) -> None:
        hardware = self._sim.hardware
        while self._line and self.sequences < hardware.max_sequences:
            run = self._line[0]
            room = run.request.prompt_tokens + run.request.output_tokens
            if self._ends and self.context + room > hardware.decode_tokens:
                break
            self._line.popleft()
            ends = self._steps + run.request.output_tokens - 1
            heapq.heappush(self._ends, (ends, run.request.number, run))
            self.context += run.request.prompt_tokens
        self._plan()

    def _advance(self) -> None:
        """Up to now."""
        elapsed_ms, self._at_ms = self._sim.now_ms - self._at_ms, self._sim.now_ms
        if not self._ends or elapsed_ms <= 0:
            return
        # A step takes a + b k after k steps: elapsed = a k + b k^2 / 2.
        a, b = self.step_ms(), self._sim.hardware.decode.context_ms * 1e-3 * self.sequences
        steps = (math.sqrt(a * a + 2 * b * elapsed_ms) - a) / b if b else elapsed_ms / a
        self._steps += steps
        self.context += steps * self.sequences

    def _plan(self) -> None:
        self._version += 1
        if self._ends:
            k = max(self._ends[0][0] - self._steps, 0.0)
            b = self._sim.hardware.decode.context_ms * 1e-3 * self.sequences
            due_ms = self._sim.now_ms + self.step_ms() * k + b * k * k / 2
            version = self._version
            self._sim.at(due_ms, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            _, _, run = heapq.heappop(self._ends)
            self.context -= run.request.prompt_tokens + run.request.output_tokens - 1
            self.release(run)
            run.done_ms = self._sim.now_ms
        if not self._ends:
            self.context = 0.0
        self._admit()

    def expect(self, run: Run) -> None:
        """A request was routed here."""
        self.assigned += 1
        self.assigned_tokens += run.request.prompt_tokens

    def release(self, run: Run) -> None:
        """It is over."""
        self.assigned -= 1
        self.assigned_tokens -= run.request.prompt_tokens


class Simulation:
    """All workers, one rule, one workload."""

    def __init__(self, hardware: Hardware, policy: Policy, *, seed: int = 0) -> None:
        self.hardware = hardware
        self.policy = policy
        self.now_ms = 0.0
        self.prefill = [PrefillNode(i, self) for i in range(hardware.n_prefill)]
        self.decode = [DecodeNode(self) for _ in range(hardware.n_decode)]
        self.runs: list[Run] = []
        self._draw = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_ms: float, event: Callable[[], None]) -> None:
        """Run `event` then."""
        heapq.heappush(self._events, (time_ms, next(self._numbers), event))

    def noisy(self, duration_ms: float) -> float:
        """A duration as it happens."""
        return duration_ms * self._draw.uniform(1 - self.hardware.noise, 1 + self.hardware.noise)

    def run(self, requests: Sequence[TraceRequest]) -> list[Run]:
        """Serve all; returns when the last one is done."""
        arrivals = deque(requests)
        while arrivals or self._events:
            if arrivals and (not self._events or arrivals[0].at_ms <= self._events[0][0]):
                request = arrivals.popleft()
                self.now_ms = request.at_ms
                self._arrive(request)
                continue
            self.now_ms, _, event = heapq.heappop(self._events)
            event()
        return self.runs

    def _arrive(self, request: TraceRequest) -> None:
        run = Run(request, expected_uncached=request.prompt_tokens, sent_ms=self.now_ms)
        self.runs.append(run)
        run.prefill, run.decode = self.policy.choose(run, self)
        worker = self.prefill[run.prefill]
        if len(worker.line) >= self.hardware.max_waiting:
            run.rejected = True
            return
        run.queued_tokens, run.queued_requests = worker.queued_tokens(self.now_ms), worker.requests
        self.decode[run.decode].expect(run)
        worker.send(run)

    def computed(self, run: Run) -> None:
        """The first token is there: the KV goes to decode, unless that was all."""
        node = self.decode[run.decode]
        if run.request.output_tokens <= 1:
            run.done_ms = self.now_ms
            node.release(run)
            return
        pull_ms = self.noisy(self.hardware.decode.transfer_ms(run.request.prompt_tokens * KV_BYTES_PER_TOKEN))
        self.at(self.now_ms + pull_ms, lambda: node.join(run))

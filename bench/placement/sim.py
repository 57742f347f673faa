"""Prefill and decode workers on a virtual clock, for any rule that places requests.

The workers are in prefill.py and decode.py. Times carry a few percent of seeded noise.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from bench.placement.cache import LruCache
from bench.placement.decode import DecodeNode
from bench.placement.model import KV_BYTES_PER_TOKEN, Hardware, Run
from bench.placement.prefill import InOrder, PrefillNode, SharedSteps
from bench.placement.trace import TraceRequest


class Policy(Protocol):
    """A rule that places requests. It gets what a router would hear."""

    name: str

    def choose(self, run: Run, sim: Simulation) -> tuple[int, int]:
        """(prefill worker, decode worker) for the request, now; sets `peer` where KV is to be read there."""

    def computed(self, run: Run, sim: Simulation) -> None:
        """The first token came."""

    def blocks_changed(
        self, worker: int, new: Sequence[bytes], evicted: Sequence[bytes], now_ms: float
    ) -> None:
        """The cache of a prefill worker, or of the kvstore (STORE), has changed."""


class Simulation:
    """All workers, one rule, one workload."""

    def __init__(self, hardware: Hardware, policy: Policy, *, seed: int = 0) -> None:
        self.hardware = hardware
        self.policy = policy
        self.now_ms = 0.0
        node = InOrder if hardware.in_order else SharedSteps
        self.prefill: list[PrefillNode] = [node(i, self) for i in range(hardware.n_prefill)]
        self.store = LruCache(hardware.store_blocks) if hardware.store_blocks else None
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
        if len(worker.line) > self.hardware.max_waiting:
            run.rejected = True
            return
        self.decode[run.decode].expect(run)
        worker.send(run)

    def lender(self, worker: int) -> PrefillNode:
        """A prefill worker, to read from."""
        return self.prefill[worker]

    def blocks_changed(self, worker: int, new: Sequence[bytes], evicted: Sequence[bytes]) -> None:
        """The cache of a prefill worker, or of the kvstore (STORE), has changed."""
        self.policy.blocks_changed(worker, new, evicted, self.now_ms)

    def computed(self, run: Run) -> None:
        """The first token is there: the KV goes to decode, unless that was all."""
        self.policy.computed(run, self)
        node = self.decode[run.decode]
        if run.request.output_tokens <= 1:
            run.done_ms = self.now_ms
            node.release(run)
            return
        pull_ms = self.noisy(self.hardware.decode.transfer_ms(run.request.prompt_tokens * KV_BYTES_PER_TOKEN))
        self.at(self.now_ms + pull_ms, lambda: node.join(run))

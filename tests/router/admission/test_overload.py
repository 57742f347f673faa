"""The controller on a virtual clock: oscillation of a naive forecast, and tenfold overload."""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from services.router.admission.controller import AdmissionController
from services.router.admission.forecast import Capacity
from services.router.admission.types import AdmissionLimits, AdmissionRequest, Priority, Verdict

PREFILL_WORKERS = 24
DECODE_PLACES = 32
PREFILL_TOKENS = 8_000
PREFILL_RATE = 1.0  # tokens a millisecond and worker: 8 s a prompt
DECODE_MS = 24_000.0
HANDOFF_WAIT_MS = 500.0  # how long prefilled KV waits for a decode place
CAPACITY = Capacity(PREFILL_WORKERS * PREFILL_RATE, PREFILL_WORKERS, DECODE_PLACES)


@dataclass
class SimulatedCluster:
    """Prefill workers and decode places; a prefill without a decode place in time is wasted."""

    controller: AdmissionController
    may_wait: bool
    deadline_ms: float | None = None
    now_ms: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    prefill_queue: list[str] = field(default_factory=list)
    arrived_ms: dict[str, float] = field(default_factory=dict)
    prefilling: int = 0
    decoding: int = 0
    good: int = 0
    wasted: int = 0
    rejected: int = 0  # at arrival
    expired: int = 0  # after waiting
    _count: int = 0

    def at(self, when_ms: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self.events, (when_ms, self._count, what))

    def run(self, until_ms: float) -> None:
        while self.events and self.events[0][0] <= until_ms:
            self.now_ms, _, what = heapq.heappop(self.events)
            what()

    def arrive(self, key: str, priority: Priority = Priority.DEFAULT) -> None:
        self.arrived_ms[key] = self.now_ms
        deadline_ms = None if self.deadline_ms is None else self.now_ms + self.deadline_ms
        tokens = PREFILL_TOKENS
        request = AdmissionRequest(
            key, "t", priority, tokens, tokens, 100, may_wait=self.may_wait, deadline_ms=deadline_ms
        )
        decision = self.controller.offer(request, CAPACITY, self.now_ms)
        if decision.verdict is Verdict.ADMITTED:
            self.start_prefill(key)
        elif decision.verdict is Verdict.REFUSED:
            self.rejected += 1

    def poll(self) -> None:
        changes = self.controller.poll(CAPACITY, self.now_ms)
        self.expired += len(changes.expired)
        for key in changes.admitted:
            self.start_prefill(key)

    def tick(self) -> None:
        """Poll regularly: requests that only the passing time admits cause no event."""
        self.poll()
        self.at(self.now_ms + 100.0, self.tick)

    def start_prefill(self, key: str) -> None:
        self.prefill_queue.append(key)
        self.fill_prefill_workers()

    def fill_prefill_workers(self) -> None:
        while self.prefill_queue and self.prefilling < PREFILL_WORKERS:
            key = self.prefill_queue.pop(0)
            self.prefilling += 1
            self.at(self.now_ms + PREFILL_TOKENS / PREFILL_RATE, lambda key=key: self.end_prefill(key))  # type: ignore[misc]

    def end_prefill(self, key: str) -> None:
        self.prefilling -= 1
        self.fill_prefill_workers()
        self.hand_off(key, until_ms=self.now_ms + HANDOFF_WAIT_MS)

    def hand_off(self, key: str, *, until_ms: float) -> None:
        if self.decoding >= DECODE_PLACES and self.now_ms < until_ms:
            self.at(self.now_ms + 50.0, lambda: self.hand_off(key, until_ms=until_ms))
            return
        if self.decoding >= DECODE_PLACES:
            self.wasted += 1
            self.controller.end(key, self.now_ms)
            self.poll()
            return
        self.decoding += 1
        self.controller.first_token(key, self.now_ms)
        self.at(self.now_ms + DECODE_MS, lambda: self.end_decode(key))

    def end_decode(self, key: str) -> None:
        self.decoding -= 1
        self.controller.end(key, self.now_ms, output_tokens=100)
        took_ms = self.now_ms - self.arrived_ms[key]
        self.good += self.deadline_ms is None or took_ms <= self.deadline_ms
        self.poll()


# The capacity of the fleet is that of its narrower tier.
PEAK_PER_MS = min(PREFILL_WORKERS * PREFILL_RATE / PREFILL_TOKENS, DECODE_PLACES / DECODE_MS)


def _simulate(
    *, naive: bool, load: float, minutes: float, may_wait: bool, seed: int, deadline_ms: float | None = None
) -> tuple[SimulatedCluster, list[int], list[int]]:
    """Simulate a Poisson stream of `load` times the peak; sample both tiers after five minutes."""
    limits = AdmissionLimits(max_running=4096, max_prefill_wait_ms=4_000.0)
    cluster = SimulatedCluster(AdmissionController(limits, naive_forecast=naive), may_wait, deadline_ms)
    rng, when_ms, number = random.Random(seed), 0.0, 0
    end_ms = minutes * 60_000
    while when_ms < end_ms:
        when_ms += rng.expovariate(PEAK_PER_MS * load)
        number += 1
        cluster.at(when_ms, lambda key=f"r{number}": cluster.arrive(key))  # type: ignore[misc]
    cluster.tick()
    prefill: list[int] = []
    decode: list[int] = []
    at_ms = 0.0
    while at_ms < end_ms:
        at_ms += 1_000.0
        cluster.run(at_ms)
        if at_ms > 300_000:
            prefill.append(cluster.prefilling + len(cluster.prefill_queue))
            decode.append(cluster.decoding)
    return cluster, prefill, decode


def test_forecasting_decode_for_the_end_of_prefill_avoids_oscillation_and_waste() -> None:
    naive, naive_prefill, naive_decode = _simulate(naive=True, load=2.0, minutes=20, may_wait=False, seed=1)
    ahead, ahead_prefill, ahead_decode = _simulate(naive=False, load=2.0, minutes=20, may_wait=False, seed=1)
    print(
        f"naive: prefill {statistics.mean(naive_prefill):.1f} +- {statistics.pstdev(naive_prefill):.1f}, "
        f"decode +- {statistics.pstdev(naive_decode):.1f}, good {naive.good}, wasted {naive.wasted}; ahead: "
        f"prefill {statistics.mean(ahead_prefill):.1f} +- {statistics.pstdev(ahead_prefill):.1f}, "
        f"decode +- {statistics.pstdev(ahead_decode):.1f}, good {ahead.good}, wasted {ahead.wasted}"
    )
    # The naive forecast oscillates between its tiers and wastes prefills.
    assert statistics.pstdev(naive_prefill) > 2 * statistics.pstdev(ahead_prefill)
    assert statistics.correlation(naive_prefill, naive_decode) < -0.2
    assert naive.wasted > 0.1 * naive.good
    assert ahead.wasted <= 0.02 * ahead.good
    assert ahead.good >= 0.95 * naive.good


def test_ten_times_overload_keeps_the_goodput_of_the_peak() -> None:
    options = {"naive": False, "minutes": 8.0, "may_wait": True, "seed": 2, "deadline_ms": 60_000.0}
    peak, _, _ = _simulate(load=1.0, **options)  # type: ignore[arg-type]
    over, _, _ = _simulate(load=10.0, **options)  # type: ignore[arg-type]
    refused = f"rejected {over.rejected}, expired {over.expired}"
    print(f"good at 1x {peak.good}, at 10x {over.good}, wasted {over.wasted}, {refused}")
    assert over.good >= 0.95 * peak.good
    assert over.wasted <= 0.01 * over.good
    assert over.rejected > 5 * over.good
    # Nearly all excess requests are rejected at arrival.
    assert over.expired < over.rejected / 10

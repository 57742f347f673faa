"""Rules for the size of each tier: ours behind HPA, fixed fleets, and Dynamo's published planner rules."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from bench.autoscale.fleet import TIERS, PrefillLine, SimulatedFleet, SimulatedWorker
from bench.autoscale.hpa import PERIOD_S, HpaController
from bench.placement.compare import TPOT_LIMIT_MS, TTFT_LIMIT_MS
from bench.placement.decode import DecodeNode
from libs.common.cluster.worker_record import Role
from services.router.autoscale.decision import recommend
from services.router.autoscale.types import AutoscalePolicy, TierLimits, WorkerLoad
from slipstream.v1 import worker_pb2

MOST = 64
UP_WINDOW_S = 60.0  # as docs/autoscaling.md advises


@dataclass
class FixedFleet:
    """The same sizes all day."""

    name: str
    sizes: dict[Role, int]
    period_ms: float = PERIOD_S * 1e3

    def decide(self, fleet: SimulatedFleet) -> dict[Role, int]:
        """Keep the replicas of the beginning."""
        return self.sizes


class OurAutoscaling:
    """The router's decision from load reports, then HPA with its default behaviour."""

    name = "slipstream"
    period_ms = PERIOD_S * 1e3

    def __init__(self) -> None:
        limits = {role: TierLimits(1, MOST) for role in Role}
        self._policy = AutoscalePolicy(limits=limits)
        self._hpas = {role: HpaController(1, MOST, up_window_s=UP_WINDOW_S) for role in TIERS}

    def decide(self, fleet: SimulatedFleet) -> dict[Role, int]:
        """One period of both HPAs."""
        loads = [
            self._load_of(fleet, role, number, worker)
            for role in self._hpas
            for number, worker in enumerate(fleet.serving(role))
        ]
        sizes = {}
        for role, hpa in self._hpas.items():
            total = recommend(loads, role, self._policy).bounded_load
            sizes[role] = hpa.step(fleet.now_ms / 1e3, replicas=fleet.replicas(role), total=total)
        return sizes

    def _load_of(self, fleet: SimulatedFleet, role: Role, number: int, worker: SimulatedWorker) -> WorkerLoad:
        node, hardware, now_ms = worker.node, fleet.hardware, fleet.now_ms
        if isinstance(node, PrefillLine):
            done_ms = node.done_ms(now_ms)
            busy = (done_ms - worker.done_before_ms) / self.period_ms
            worker.done_before_ms = done_ms
            report = worker_pb2.LoadReport(
                requests_running=node.requests(now_ms),
                prefill_tokens_in_flight=int(node.tokens_left(now_ms)),
                prefill_tokens_per_s=1e3 / hardware.prefill.token_ms,
                busy_share=min(max(busy, 0.0), 1.0),
            )
            return WorkerLoad(role, f"prefill-{number}", report)
        held = int(node.context)
        report = worker_pb2.LoadReport(
            requests_running=node.sequences,
            requests_waiting=max(node.assigned - node.sequences, 0),
            blocks_held=held // 64,
            blocks_free=max(hardware.decode_tokens - held, 0) // 64,
            decode_step_ms=node.step_ms(),
        )
        return WorkerLoad(role, f"decode-{number}", report, hardware.max_sequences)


@dataclass
class DynamoPlanner:
    """The two loops of Dynamo's documents, as far as these state them; periods and floors are our reading.

    The load loop moves a tier by one: up when the estimate of every engine is above the limit, down when
    every one is below `sensitivity` of it; it waits while a worker starts. The throughput loop predicts the
    last interval's traffic once more, and its result is a floor.
    """

    name: str = "Dynamo's planner rules"
    period_ms: float = PERIOD_S * 1e3
    throughput_period_ms: float = 180_000.0
    sensitivity: float = 0.8
    _floor: dict[Role, int] = field(default_factory=lambda: {Role.PREFILL: 1, Role.DECODE: 1})
    _next_ms: float = 0.0
    _seen: tuple[int, int] = (0, 0)

    def decide(self, fleet: SimulatedFleet) -> dict[Role, int]:
        """Both loops."""
        if fleet.now_ms >= self._next_ms:
            self._predict(fleet)
            self._next_ms = fleet.now_ms + self.throughput_period_ms
        estimates = {Role.PREFILL: self._ttfts(fleet), Role.DECODE: self._itls(fleet)}
        limits = {Role.PREFILL: TTFT_LIMIT_MS, Role.DECODE: TPOT_LIMIT_MS}
        sizes = {}
        for role, found in estimates.items():
            n = fleet.replicas(role)
            if len(fleet.serving(role)) == n:
                n += all(each > limits[role] for each in found)
                n -= all(each < limits[role] * self.sensitivity for each in found)
            sizes[role] = min(max(n, self._floor[role], 1), MOST)
        return sizes

    def _ttfts(self, fleet: SimulatedFleet) -> list[float]:
        mean = fleet.arrived_uncached / max(fleet.arrived, 1)
        lines = [worker.node for worker in fleet.serving(Role.PREFILL)]
        token_ms = fleet.hardware.prefill.token_ms
        return [
            (line.tokens_left(fleet.now_ms) + mean) * token_ms
            for line in lines
            if isinstance(line, PrefillLine)
        ]

    def _itls(self, fleet: SimulatedFleet) -> list[float]:
        nodes = [worker.node for worker in fleet.serving(Role.DECODE)]
        return [node.step_ms() for node in nodes if isinstance(node, DecodeNode)]

    def _predict(self, fleet: SimulatedFleet) -> None:
        """The floors for the traffic of the last interval."""
        before_uncached, before_output = self._seen
        self._seen = (fleet.arrived_uncached, fleet.arrived_output)
        per_ms = 1.0 / self.throughput_period_ms
        uncached_per_ms = (fleet.arrived_uncached - before_uncached) * per_ms
        output_per_ms = (fleet.arrived_output - before_output) * per_ms
        context = fleet.arrived_tokens / max(fleet.arrived, 1)
        decode = fleet.hardware.decode
        batch = 1
        while batch < fleet.hardware.max_sequences and (
            decode.step_ms(batch + 1, int((batch + 1) * context)) <= TPOT_LIMIT_MS
        ):
            batch += 1
        tokens_per_ms = batch / decode.step_ms(batch, int(batch * context))
        self._floor = {
            Role.PREFILL: math.ceil(uncached_per_ms * fleet.hardware.prefill.token_ms),
            Role.DECODE: math.ceil(output_per_ms / tokens_per_ms),
        }

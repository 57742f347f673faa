"""Rules side by side on one workload and one hardware."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import mean

from bench.placement.bound import bound
from bench.placement.cache import shared_cache_share
from bench.placement.model import Hardware, Run, percentile
from bench.placement.policies import (
    LeastLoad,
    PrefixAware,
    RoundRobin,
    SessionHash,
    Slipstream,
)
from bench.placement.sim import Policy, Simulation
from bench.placement.trace import TraceRequest

TTFT_LIMIT_MS = 6_000.0
TPOT_LIMIT_MS = 50.0


@dataclass(frozen=True, slots=True)
class Result:
    """How a rule did. Shares are of 1; times in milliseconds; goodput in requests/s within both limits."""

    rule: str
    cached_share: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p90_ms: float
    imbalance: float  # busiest prefill worker's work over the mean
    goodput_per_s: float
    rejected_share: float


def simulate(
    requests: Sequence[TraceRequest],
    hardware: Hardware,
    policy: Policy,
    *,
    ttft_limit_ms: float = TTFT_LIMIT_MS,
    tpot_limit_ms: float = TPOT_LIMIT_MS,
) -> Result:
    """One workload under one rule."""
    sim = Simulation(hardware, policy)
    runs = sim.run(requests)
    served = [run for run in runs if not run.rejected]
    good = [run for run in served if run.ttft_ms <= ttft_limit_ms and run.tpot_ms <= tpot_limit_ms]
    span_s = (requests[-1].at_ms - requests[0].at_ms) / 1e3
    several = [run for run in served if run.request.output_tokens > 1]
    work = [node.busy_ms for node in sim.prefill]
    return Result(
        rule=policy.name,
        cached_share=_cached_share(served),
        ttft_p50_ms=percentile([run.ttft_ms for run in served], 0.5),
        ttft_p90_ms=percentile([run.ttft_ms for run in served], 0.9),
        ttft_p99_ms=percentile([run.ttft_ms for run in served], 0.99),
        tpot_p50_ms=percentile([run.tpot_ms for run in several], 0.5),
        tpot_p90_ms=percentile([run.tpot_ms for run in several], 0.9),
        imbalance=max(work) / max(mean(work), 1e-9),
        goodput_per_s=len(good) / max(span_s, 1e-9),
        rejected_share=1 - len(served) / len(runs),
    )


def _cached_share(runs: Sequence[Run]) -> float:
    return sum(run.cached_tokens for run in runs) / max(sum(r.request.prompt_tokens for r in runs), 1)


RULES: tuple[Callable[[], Policy], ...] = (RoundRobin, LeastLoad, SessionHash, PrefixAware, Slipstream)


def several_routers() -> Policy:
    """Ours, in four routers that share nothing."""
    return Slipstream(4)


def compare(
    name: str,
    requests: Sequence[TraceRequest],
    hardware: Hardware,
    *,
    limits: tuple[float, float] = (TTFT_LIMIT_MS, TPOT_LIMIT_MS),
    rules: Sequence[Callable[[], Policy]] = RULES,
) -> dict[str, object]:
    """All rules on one workload, and what they are measured against. One of them is ours."""
    results = [
        simulate(requests, hardware, rule(), ttft_limit_ms=limits[0], tpot_limit_ms=limits[1])
        for rule in rules
    ]
    ours = next(result for result in results if result.rule == Slipstream.name)
    others = [result for result in results if not result.rule.startswith(Slipstream.name)]
    shared = shared_cache_share(requests, hardware.total_blocks)
    best_ms = min(result.ttft_p90_ms for result in others)
    return {
        "workload": name,
        "requests": len(requests),
        "shared_cache_share": shared,
        "cached_share_of_shared": ours.cached_share / max(shared, 1e-9),
        "ttft_p90_best_other_ms": best_ms,
        "ttft_p90_below_best_other": 1 - ours.ttft_p90_ms / max(best_ms, 1e-9),
        "bound": asdict(bound(requests, hardware)),
        "results": [asdict(result) for result in results],
    }

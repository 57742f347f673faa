"""python -m bench.placement: where requests go, and what that is worth.

    python -m bench.placement --trace conversation_trace.jsonl --workers 8 [--json]

The router's decision code against other rules on the same simulated workers (bench/placement_sim.py), on a
trace in Mooncake's format and on generated agent sessions. No wall clock enters: the same arguments give
the same figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from bench.placement_cache import shared_cache_share
from bench.placement_policies import (
    LeastLoad,
    PrefixAware,
    RoundRobin,
    SessionHash,
    Slipstream,
)
from bench.placement_sim import Hardware, Policy, Run, Simulation
from bench.placement_trace import (
    AgentShape,
    TraceRequest,
    agent_sessions,
    read_trace,
)

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


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; 0 for none."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)] if ordered else 0.0


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


RULES: tuple[Callable[[], Policy], ...] = (
    RoundRobin,
    LeastLoad,
    SessionHash,
    PrefixAware,
    Slipstream,
    lambda: Slipstream(4),
)


def compare(
    name: str, requests: Sequence[TraceRequest], hardware: Hardware, limits: tuple[float, float]
) -> dict[str, object]:
    """All rules on one workload, and what they are measured against."""
    results = [
        simulate(requests, hardware, rule(), ttft_limit_ms=limits[0], tpot_limit_ms=limits[1])
        for rule in RULES
    ]
    ours = next(result for result in results if result.rule == "slipstream")
    others = [result for result in results if not result.rule.startswith("slipstream")]
    shared = shared_cache_share(requests, hardware.n_prefill * hardware.cache_blocks)
    best_ms = min(result.ttft_p90_ms for result in others)
    return {
        "workload": name,
        "requests": len(requests),
        "shared_cache_share": shared,
        "cached_share_of_shared": ours.cached_share / max(shared, 1e-9),
        "ttft_p90_below_best_other": 1 - ours.ttft_p90_ms / max(best_ms, 1e-9),
        "results": [asdict(result) for result in results],
    }


def _print(report: dict[str, object]) -> None:
    console = Console(width=140)
    console.print(f"\n{report['workload']}: {report['requests']} requests", highlight=False)
    table = Table(box=None, pad_edge=False)
    headings = (
        "rule",
        "cached",
        "TTFT p50",
        "p90",
        "p99 ms",
        "TPOT p50",
        "p90 ms",
        "imbalance",
        "goodput/s",
        "rejected",
    )
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    results = report["results"]
    assert isinstance(results, list)
    for row in results:
        table.add_row(
            row["rule"],
            f"{row['cached_share']:.1%}",
            f"{row['ttft_p50_ms']:.0f}",
            f"{row['ttft_p90_ms']:.0f}",
            f"{row['ttft_p99_ms']:.0f}",
            f"{row['tpot_p50_ms']:.1f}",
            f"{row['tpot_p90_ms']:.1f}",
            f"{row['imbalance']:.2f}",
            f"{row['goodput_per_s']:.3f}",
            f"{row['rejected_share']:.1%}",
        )
    console.print(table)
    console.print(
        f"one shared cache of the same size: {report['shared_cache_share']:.1%} cached; "
        f"slipstream has {report['cached_share_of_shared']:.1%} of that, "
        f"and its p90 TTFT is {report['ttft_p90_below_best_other']:.0%} below the best other rule",
        highlight=False,
    )


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m bench.placement", description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, help="Mooncake trace; without it only agent sessions are run")
    parser.add_argument("--workers", type=int, default=8, help="prefill workers, and as many decode workers")
    parser.add_argument("--cache-blocks", type=int, default=Hardware().cache_blocks, help="512 tokens each")
    parser.add_argument("--speed", type=float, default=1.0, help="the trace so many times as fast")
    parser.add_argument("--agents-per-s", type=float, default=AgentShape().sessions_per_s)
    parser.add_argument("--ttft-limit-ms", type=float, default=TTFT_LIMIT_MS)
    parser.add_argument("--tpot-limit-ms", type=float, default=TPOT_LIMIT_MS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    hardware = replace(
        Hardware(), n_prefill=options.workers, n_decode=options.workers, cache_blocks=options.cache_blocks
    )
    workloads: list[tuple[str, list[TraceRequest]]] = []
    if options.trace is not None:
        workloads.append((options.trace.name, read_trace(options.trace, speed=options.speed)))
    shape = replace(AgentShape(), sessions_per_s=options.agents_per_s)
    workloads.append(("agent sessions", agent_sessions(shape, seed=options.seed)))
    limits = (options.ttft_limit_ms, options.tpot_limit_ms)
    reports = [compare(name, requests, hardware, limits) for name, requests in workloads]
    if options.json:
        print(json.dumps(reports, indent=2))
    else:
        for report in reports:
            _print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""python -m bench.autoscale: a day of traffic on fleets of changing and of fixed size.

    python -m bench.autoscale [--trace conversation_trace.jsonl] [--requests 40000] [--json]

The share of the requests within the limits, and the worker hours, of four sides: the router's
decisions behind HPA's formula, fixed fleets of the least, the mean and the most workers that these used, and
Dynamo's published planner rules. Without a trace the load is generated agent sessions. No wall clock enters.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.autoscale.day import DAY_MS, day_of
from bench.autoscale.fleet import START_MS, TIERS, ScalingRule, SimulatedFleet
from bench.autoscale.rules import DynamoPlanner, FixedFleet, OurAutoscaling
from bench.command_line import bench_parser
from bench.placement.compare import TPOT_LIMIT_MS, TTFT_LIMIT_MS
from bench.placement.model import Hardware, percentile
from bench.placement.trace import AgentShape, TraceRequest, agent_sessions, read_trace
from libs.common.cluster.worker_record import Role

REQUESTS = 40_000
# Tools that return files, and answers that reason.
_AGENTS = AgentShape(duration_ms=3_600_000.0, turns=(3, 10), turn_blocks=(0, 24), output_tokens=(400, 2000))


def simulate(
    trace: Sequence[TraceRequest], rule: ScalingRule, n_requests: int, sizes: dict[Role, int]
) -> Any:
    """The day under one rule: (figures, the fleet)."""
    fleet = SimulatedFleet(Hardware(), rule, sizes=sizes)
    fleet.run(day_of(trace, n_requests), until_ms=DAY_MS)
    done = [run for run in fleet.runs if not math.isinf(run.done_ms)]
    late = [run for run in fleet.runs if run.ttft_ms > TTFT_LIMIT_MS]
    slow = [run for run in done if run.tpot_ms > TPOT_LIMIT_MS]
    good = sum(run.ttft_ms <= TTFT_LIMIT_MS and run.tpot_ms <= TPOT_LIMIT_MS for run in done)
    n = len(fleet.runs)
    hours = {str(role): round(fleet.hours(role), 1) for role in TIERS}
    return {
        "rule": rule.name,
        "within_limits": round(good / n, 4),
        "ttft_within": round(1 - len(late) / n, 4),
        "tpot_within": round(1 - (len(slow) + n - len(done)) / n, 4),
        "ttft_p90_ms": round(percentile([run.ttft_ms for run in fleet.runs], 0.9)),
        "ttft_p99_ms": round(percentile([run.ttft_ms for run in fleet.runs], 0.99)),
        "tpot_p90_ms": round(percentile([run.tpot_ms for run in done], 0.9), 1),
        "worker_hours": hours,
        "worker_hours_total": round(sum(hours.values()), 1),
        "resizes": fleet.changes - len(TIERS),
        "sizes": {
            str(role): {
                "least": min(fleet.sizes[role]),
                "mean": round(sum(fleet.sizes[role]) / len(fleet.sizes[role]), 2),
                "most": max(fleet.sizes[role]),
            }
            for role in TIERS
        },
    }


def compare(name: str, trace: Sequence[TraceRequest], n_requests: int) -> dict[str, Any]:
    """All rules on one day."""
    start = dict.fromkeys(TIERS, 1)
    ours = simulate(trace, OurAutoscaling(), n_requests, start)
    rows = [ours, simulate(trace, DynamoPlanner(), n_requests, start)]
    for figure in ("least", "mean", "most"):
        sizes = {role: math.ceil(ours["sizes"][role][figure]) for role in TIERS}
        rows.append(simulate(trace, FixedFleet(f"fixed, our {figure}", sizes), n_requests, sizes))
    return {
        "load": name,
        "requests": n_requests,
        "ttft_limit_ms": TTFT_LIMIT_MS,
        "tpot_limit_ms": TPOT_LIMIT_MS,
        "worker_start_ms": START_MS,
        "results": rows,
    }


def main(arguments: list[str] | None = None) -> int:
    """Run and print."""
    parser = bench_parser("autoscale", __doc__)
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of the day")
    parser.add_argument("--seed", type=int, default=0, help="of the generated load")
    options = parser.parse_args(arguments)
    if options.trace is not None:
        name, trace = options.trace.name, read_trace(options.trace)
    else:
        name, trace = "agent sessions", agent_sessions(_AGENTS, seed=options.seed)
    report = compare(name, trace, options.requests)
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print(report)
    return 0


def _print(report: dict[str, Any]) -> None:
    console = Console(width=140, highlight=False)
    console.print(f"{report['load']}: {report['requests']} requests in a day")
    table = Table(box=None, pad_edge=False)
    headings = ("rule", "in limits", "TTFT p90", "p99 ms", "TPOT p90 ms", "prefill h", "decode h", "resizes")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for row in report["results"]:
        table.add_row(
            row["rule"],
            f"{row['within_limits']:.2%}",
            f"{row['ttft_p90_ms']}",
            f"{row['ttft_p99_ms']}",
            f"{row['tpot_p90_ms']}",
            f"{row['worker_hours']['prefill']}",
            f"{row['worker_hours']['decode']}",
            f"{row['resizes']}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())

"""python -m bench.placement: where requests go, and what that is worth.

    python -m bench.placement --trace conversation_trace.jsonl --workers 8 [--json]
    python -m bench.placement --trace conversation_trace.jsonl --held-out
    python -m bench.placement --trace conversation_trace.jsonl --sweep

The router's decision code against other rules on the same simulated workers (bench/placement/sim.py), on a
trace in Mooncake's format and on generated agent sessions. No wall clock enters: the same arguments give
the same figures. `--held-out`: paces, numbers of workers and seeds that nothing was chosen on. `--sweep`:
from an idle fleet to a full one (bench/placement/sweep.py), and who gains what when workers lend caches.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.command_line import bench_parser
from bench.placement.compare import RULES, TPOT_LIMIT_MS, TTFT_LIMIT_MS, compare, several_routers
from bench.placement.model import Hardware
from bench.placement.sweep import lending, sweep
from bench.placement.trace import AgentShape, TraceRequest, agent_sessions, read_trace

# Of the memory, where there is a kvstore.
STORE_SHARE = 0.75
# Requests of the trace in each held-out load.
_HELD_OUT_REQUESTS = 6_000
_HEADINGS = (
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

Load = tuple[str, list[TraceRequest], Hardware]


def setups(hardware: Hardware) -> Iterator[tuple[str, Hardware]]:
    """The same memory and speed in three forms."""
    yield "production workers, no kvstore", hardware
    yield "workers that compute in order, no kvstore", replace(hardware, in_order=True)
    store = int(hardware.total_blocks * STORE_SHARE)
    in_workers = (hardware.total_blocks - store) // hardware.n_prefill
    yield (
        "production workers, three quarters of the memory in a kvstore",
        replace(hardware, cache_blocks=in_workers, store_blocks=store),
    )


def held_out(trace: Path | None) -> Iterator[Load]:
    """Loads to look at after everything was chosen."""
    for speed, n in ((0.7, 8), (1.5, 8), (1.0, 4), (1.0, 16)) if trace is not None else ():
        assert trace is not None
        requests = read_trace(trace, speed=speed)[-_HELD_OUT_REQUESTS:]
        yield f"trace, second half, {speed:g}x, {n} workers", requests, _workers(n)
    for rate, n, seed in ((0.25, 8, 11), (0.17, 8, 12), (0.35, 8, 13), (0.12, 4, 14), (0.5, 16, 15)):
        sessions = agent_sessions(replace(AgentShape(), sessions_per_s=rate), seed=seed)
        yield f"agents, {rate:g} sessions/s, {n} workers, seed {seed}", sessions, _workers(n)


def _workers(n: int) -> Hardware:
    return replace(Hardware(), n_prefill=n, n_decode=n)


def _print(report: dict[str, Any]) -> None:
    console = Console(width=140, highlight=False)
    console.print(f"\n{report['workload']}: {report['requests']} requests")
    table = Table(box=None, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "rule" else "right")
    for row in report["results"]:
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
    bound, best_ms = report["bound"], report["ttft_p90_best_other_ms"]
    console.print(
        f"one shared cache of the same size: {report['shared_cache_share']:.1%} cached; "
        f"slipstream has {report['cached_share_of_shared']:.1%} of that, "
        f"and its p90 TTFT is {report['ttft_p90_below_best_other']:.0%} below the best other rule"
    )
    console.print(
        f"p90 TTFT with one such cache and one queue: {bound['one_queue_p90_ms']:.0f} ms, "
        f"{_below(bound['one_queue_p90_ms'], best_ms)}; "
        f"with a worker for each prompt: {bound['no_queue_p90_ms']:.0f} ms, "
        f"{_below(bound['no_queue_p90_ms'], best_ms)}"
    )


def _below(ours_ms: float, theirs_ms: float) -> str:
    share = 1 - ours_ms / max(theirs_ms, 1e-9)
    return f"{abs(share):.0%} {'below' if share >= 0 else 'above'} the best other rule"


def _print_sweep(report: dict[str, Any]) -> None:
    console = Console(width=140, highlight=False)
    console.print(f"\n{report['workload']}: p90 TTFT in ms (cached share; requests/s within both limits)")
    table = Table(box=None, pad_edge=False)
    rules = [row["rule"] for row in report["loads"][0]["results"]]
    for heading in ("load", "uncached", "pace", *rules, "below best other"):
        table.add_column(heading, justify="right")
    for row in report["loads"]:
        cells = [
            f"{each['ttft_p90_ms']:.0f} ({each['cached_share']:.1%}; {each['goodput_per_s']:.2f})"
            for each in row["results"]
        ]
        loads = (f"{row['least_load']:.2f}", f"{row['uncached_load']:.2f}", f"{row['pace']:.2f}")
        table.add_row(*loads, *cells, f"{row['ttft_p90_below_best_other']:.0%}")
    console.print(table)
    known = report["capacity_is"]
    capacity = ", ".join(f"{rule} {known[rule]} {load:.2f}" for rule, load in report["capacity"].items())
    console.print(f"load at which p90 TTFT is {report['ttft_limit_ms']:.0f} ms: {capacity}")
    console.print(
        f"slipstream's is {report['capacity_over_best_other']:+.0%} from the best other's, "
        f"at which its p90 TTFT is {report['ttft_p90_below_best_other_at_its_capacity']:.0%} below"
    )


def _sweep(loads: Sequence[tuple[str, list[TraceRequest]]], options: Any) -> int:
    hardware = replace(_workers(options.workers), cache_blocks=options.cache_blocks)
    sweeps = [sweep(name, requests, hardware) for name, requests in loads]
    lent = [report for name, requests in loads for report in lending(name, requests, hardware)]
    if options.json:
        print(json.dumps({"sweeps": sweeps, "lending": lent}, indent=2))
        return 0
    for report in sweeps:
        _print_sweep(report)
    for report in lent:
        print(f"\n{report['workload']}")
        for row in report["results"]:  # type: ignore[attr-defined]
            print(f"  {row['rule']:28} {row['cached_share']:6.1%} cached, p90 {row['ttft_p90_ms']:8.0f} ms")
    return 0


def _compare_all(loads: Sequence[tuple[str, list[TraceRequest]]], options: Any) -> list[dict[str, Any]]:
    hardware = replace(_workers(options.workers), cache_blocks=options.cache_blocks)
    limits = (options.ttft_limit_ms, options.tpot_limit_ms)
    reports = []
    for name, requests in loads:
        for i, (setup, form) in enumerate(setups(hardware)):
            rules = (*RULES, several_routers) if i == 0 else RULES
            reports.append(compare(f"{name}; {setup}", requests, form, limits=limits, rules=rules))
    return reports


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, compare, print."""
    parser = bench_parser("placement", __doc__)
    parser.add_argument("--trace", type=Path, help="Mooncake trace; without it only agent sessions are run")
    parser.add_argument("--workers", type=int, default=8, help="prefill workers, and as many decode workers")
    parser.add_argument("--cache-blocks", type=int, default=Hardware().cache_blocks, help="512 tokens each")
    parser.add_argument("--speed", type=float, default=1.0, help="the trace so many times as fast")
    parser.add_argument("--agents-per-s", type=float, default=AgentShape().sessions_per_s)
    parser.add_argument("--ttft-limit-ms", type=float, default=TTFT_LIMIT_MS)
    parser.add_argument("--tpot-limit-ms", type=float, default=TPOT_LIMIT_MS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", action="store_true", help="other loads instead; ignores the above")
    parser.add_argument("--sweep", action="store_true", help="over the load instead")
    options = parser.parse_args(arguments)
    if options.held_out:
        # Round robin was nowhere near the best.
        reports = [compare(name, load, form, rules=RULES[1:]) for name, load, form in held_out(options.trace)]
    else:
        loads: list[tuple[str, list[TraceRequest]]] = []
        if options.trace is not None:
            loads.append((options.trace.name, read_trace(options.trace, speed=options.speed)))
        shape = replace(AgentShape(), sessions_per_s=options.agents_per_s)
        loads.append(("agent sessions", agent_sessions(shape, seed=options.seed)))
        if options.sweep:
            return _sweep(loads, options)
        reports = _compare_all(loads, options)
    if options.json:
        print(json.dumps(reports, indent=2))
    else:
        for report in reports:
            _print(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The router between fake workers and a load generator, with its CPU time measured from outside.

    python -m bench.router --json
    python -m bench.router --processes 2 --only throughput
    python -m bench.router --only throughput --smg /path/to/environment       # SMG in turn with our router

Router, workers (`bench/fakes/worker.py`) and load are separate processes, all on this machine. Prints

    latency      TTFT and time per request beyond direct calls to the workers, at 1, 8, 32, 200 streams:
                 `together`, all streams begin at once, and again when they end; `steady`, streams begin at
                 random moments
    throughput   requests/s, CPU of the router per request, TTFT, with workers of a 1 ms step
    sessions     CPU of the router per request at 1k and 32k prompt tokens, first and tenth turn, by API
    tokens       streamed tokens/s, and per second of router CPU

CPU time comes from each process's clock, so other load on the machine hardly changes it. The CPU time of the
workers and of the load is printed too: on two cores they compete with the router for requests/s.

--smg measures SMG (Shepherd Model Gateway) in every part, in turn with our router, under the same load. Fake
workers of the same pace speak its gRPC. `ratio_to_smg` is ours / SMG's, of medians of `--rounds`. The
environment needs Python 3.11 and `pip install smg smg-grpc-proto h2`.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bench.command_line import bench_parser, print_report
from bench.router.parts import Report, Rig, latency, sessions, throughput, tokens
from bench.router.rig import under_test
from bench.router.smg import SmgUnusable, smg_beside

PARTS = ("latency", "throughput", "sessions", "tokens")


async def run(arguments: argparse.Namespace, folder: Path) -> Report:
    """Measure the chosen parts."""
    report: Report = {"router_processes": arguments.processes}
    parts: dict[str, tuple[Callable[..., Awaitable[Report]], float, float]] = {
        "latency": (latency, arguments.prefill_ms, arguments.step_ms),
        "throughput": (throughput, 0.0, 1.0),
        "sessions": (sessions, 0.0, 0.0),
        "tokens": (tokens, 0.0, 0.0),
    }
    for name in arguments.only:
        part, prefill_ms, step_ms = parts[name]
        async with AsyncExitStack() as stack:
            pace = {"prefill_ms": prefill_ms, "step_ms": step_ms}
            smg = None
            if arguments.smg is not None:
                more = shlex.split(arguments.smg_arguments)
                smg = await stack.enter_async_context(smg_beside(arguments.smg, folder, more=more, **pace))
            ours = await stack.enter_async_context(
                under_test(arguments, folder, prefill_ms=prefill_ms, step_ms=step_ms)
            )
            report[name] = await part(Rig(ours, smg), arguments)
    return report


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = bench_parser("router", __doc__)
    add = parser.add_argument
    add("--only", type=lambda text: text.split(","), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    add("--api", type=lambda text: text.split(","), default=["grpc", "http"], help="of grpc, http")
    add("--streams", type=numbers, default=[1, 8, 32, 200], help="levels of the latency part")
    add("--requests", type=int, default=64, help="requests of a level; each stream has 2 to 6")
    add("--output-tokens", type=int, default=32, help="of each request of the latency part")
    add("--long-tokens", type=int, default=4000, help="of each request of the tokens part")
    add("--prefill-ms", type=float, default=20.0, help="pace of the fake workers in the latency part")
    add("--step-ms", type=float, default=20.0, help="pace of the fake workers in the latency part")
    add("--processes", type=int, default=1, help="router processes on one port")
    add("--smg", type=Path, help="environment with SMG, or its Python: measure SMG too")
    add("--smg-arguments", default="", help='more for SMG, as --smg-arguments="--policy round_robin"')
    add("--rounds", type=int, help="of latency and throughput; medians are printed (3 with --smg, else 1)")
    arguments = parser.parse_args(argv)
    if arguments.rounds is None:
        arguments.rounds = 1 if arguments.smg is None else 3
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        try:
            report = asyncio.run(run(arguments, Path(folder)))
        except SmgUnusable as error:
            sys.exit(f"bench.router: {error}")
    print_report(report, as_json=arguments.json)


if __name__ == "__main__":
    main()

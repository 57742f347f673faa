"""The router alone: fake workers behind it, load before it, its CPU measured from outside.

    python -m bench.router --json
    python -m bench.router --processes 2 --only throughput
    python -m bench.router --openai-port 9900 --peer http://127.0.0.1:30000   # another router, same fakes
    python -m bench.router --only throughput --smg /path/to/environment       # SMG in turn with ours

Router, workers (`bench/router/worker.py`) and load are separate processes, all on this machine. Prints

    latency      TTFT and time per request added over calling the workers directly, at 1, 8, 32, 200 streams:
                 `together`, all begin in the same moment and again when they end; `steady`, each at a moment
                 of its own
    throughput   requests/s, CPU of the router per request, TTFT, with workers of a 1 ms step
    sessions     CPU of the router per request at 1k and 32k prompt tokens, first turn and tenth turn, by API
    tokens       streamed tokens/s, and per second of router CPU
    cancel       milliseconds from a client's cancel until no worker holds anything of its request

CPU is read from the process's own clock: other load on the machine changes wall times, hardly these. That
of the workers and of the load itself is printed beside the router's: on two cores they compete with it.

--smg measures SMG (Shepherd Model Gateway) in every part but `cancel`, before fakes of its own of the same
pace that speak its gRPC, with the same load, in turn with our router; `ratio_to_smg` is ours / SMG's, of
medians of `--rounds`. The environment needs Python 3.11 and `pip install smg smg-grpc-proto h2`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from bench.router.parts import Report, Rig, cancel, latency, sessions, throughput, tokens
from bench.router.rig import under_test
from bench.router.smg import SmgUnusable, smg_beside

PARTS = ("latency", "throughput", "sessions", "tokens", "cancel")


async def run(arguments: argparse.Namespace, folder: Path) -> Report:
    """All parts asked for."""
    report: Report = {"router_processes": arguments.processes}
    if arguments.smg is None:
        report["known"] = KNOWN
    parts: dict[str, tuple[Callable[..., Awaitable[Report]], float, float]] = {
        "latency": (latency, arguments.prefill_ms, arguments.step_ms),
        "throughput": (throughput, 0.0, 1.0),
        "sessions": (sessions, 0.0, 0.0),
        "tokens": (tokens, 0.0, 0.0),
        "cancel": (cancel, 500.0, 20.0),
    }
    for name in arguments.only:
        part, prefill_ms, step_ms = parts[name]
        async with AsyncExitStack() as stack:
            pace = {"prefill_ms": prefill_ms, "step_ms": step_ms}
            smg = None
            if arguments.smg is not None and name != "cancel":
                more = shlex.split(arguments.smg_arguments)
                smg = await stack.enter_async_context(smg_beside(arguments.smg, folder, more=more, **pace))
            ours = await stack.enter_async_context(under_test(arguments, folder, **pace))
            report[name] = await part(Rig(ours, smg), arguments)
    return report


# SMG, measured earlier on two other cores: context where it is not measured in the run itself (--smg).
KNOWN = {
    "SMG 1.13, gRPC workers, 32-token streams, 32 at a time": {
        "requests_per_s": 674,
        "router_cpu_ms_per_request": 1.2,
        "ttft_ms": {"p50": 14, "p99": 51},
        "ttft_ms_one_at_a_time": 2.0,
    }
}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="bench.router",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", type=lambda text: text.split(","), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    add("--api", type=lambda text: text.split(","), default=["grpc", "http"], help="of grpc, http")
    add("--streams", type=numbers, default=[1, 8, 32, 200], help="levels of the latency part")
    add("--requests", type=int, default=64, help="requests of a level, 2 to 6 a stream")
    add("--output-tokens", type=int, default=32, help="of each request of the latency part")
    add("--long-tokens", type=int, default=4000, help="of each request of the tokens part")
    add("--prefill-ms", type=float, default=20.0, help="pace of the fake workers in the latency part")
    add("--step-ms", type=float, default=20.0, help="pace of the fake workers in the latency part")
    add("--processes", type=int, default=1, help="router processes on one port")
    add("--peer", help="URL of another OpenAI-style router before the fakes of --openai-port")
    add("--openai-port", type=int, default=0, help="fakes serve OpenAI-style HTTP here too")
    add("--smg", type=Path, help="environment, or its Python, that has SMG: measure that too")
    add("--smg-arguments", default="", help='more for SMG, as --smg-arguments="--policy round_robin"')
    add("--rounds", type=int, help="of latency and throughput; medians are printed (3 with --smg, else 1)")
    add("--profile", action="store_true", help="profile the router; it prints where its time went")
    add("--json", action="store_true", help="print one JSON object and nothing else")
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
    print(json.dumps(report, indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()

"""Load on a running cluster through its public gRPC API.

    python -m bench.serve --up                      # start a cluster, agents arriving open-loop
    python -m bench.serve --endpoint 127.0.0.1:7000 --rate 4 --sessions 60
    python -m bench.serve --up --streams 1,8,32 --prompt-tokens 128 --output-tokens 128
    python -m bench.serve --up --make DIR --streams 1,8,32     # the shape of bench.engine, random weights
    python -m bench.serve --up --drafts off,auto,on --streams 1,4,16     # what drafts cost and save
    python -m bench.serve --up --prompt-tokens 8192,32768,131072         # first tokens and memory by length

`--rate`: sessions of held-out help-desk dialogues arrive as a Poisson process, and each sends its turns one
after another (open loop: a slow cluster does not slow the arrivals). `--streams`: so many concurrent requests
with prompts of a fixed length, end tokens ignored. Prints TTFT and ITL (p50, p90, p99), goodput and the
cached share.

`--prompt-tokens N[,N..]` without `--streams` runs one conversation for each length: TTFT and time per token
cold and of its second turn, whose prefix is cached, and with `--up` the memory of the processes afterwards. A
checkpoint with a shorter context window gets a longer one for the run.

`--compare tiers,colocated` and `--affinity on,off` are the runs of bench.headline, with its options.

`--drafts off,auto,on` starts a cluster for each way of drafting, and lets them take turns with held-out chat
turns at each number of streams. It prints medians, and ratios to the first way (`bench/serve/drafts.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.command_line import bench_parser
from bench.headline import __main__ as headline
from bench.progress import say
from bench.request_log import summarise
from bench.serve.drafts import DraftRuns, DraftsWay, compare_drafts
from bench.serve.prompt_lengths import as_table, long_context_model, run_lengths
from bench.serve.workloads import run_sessions, run_streams
from slipstream.async_client import AsyncClient
from slipstream.cluster_record import ClusterRecord
from slipstream.errors import SlipstreamError
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.cluster_options import DEFAULT_DRAFT_MODEL, DEFAULT_MODEL
from supervisor.configuration.plan import ClusterConfig

_PROMPT_TOKENS = 128  # of the closed-loop workload


async def run(
    arguments: argparse.Namespace, endpoint: str, record: ClusterRecord | None = None
) -> list[dict[str, Any]]:
    """Run every workload on the command line; returns one report each."""
    reports = []
    limits = {"ttft_limit_ms": arguments.ttft_limit_ms, "itl_limit_ms": arguments.itl_limit_ms}
    async with AsyncClient(endpoint, max_retries=0) as client:
        await client.models()  # raises at once without a router
        if arguments.lengths:
            tokens, seed = arguments.output_tokens, arguments.seed
            return await run_lengths(
                client, arguments.lengths, output_tokens=tokens, seed=seed, record=record
            )
        for streams in arguments.streams:
            # One request warms connections and kernels, and measures the tokens of a word.
            words = arguments.prompt_tokens[0]
            options = {"output_tokens": arguments.output_tokens}
            (warm,) = await run_streams(
                client, streams=1, requests=1, prompt_words=words, seed=arguments.seed + 1, **options
            )
            words = max(1, round(words * words / (warm.prompt_tokens or words)))
            start = time.perf_counter()
            requests = max(streams * 2, arguments.requests)
            logs = await run_streams(
                client, streams=streams, requests=requests, prompt_words=words, seed=arguments.seed, **options
            )
            report = summarise(logs, wall_s=time.perf_counter() - start, **limits)
            reports.append({"workload": "streams", "streams": streams, **options, **report})
        if not arguments.streams:
            from models.helpdesk.dialogues import generate_dialogues
            from models.settings import HELD_OUT_SEED

            dialogues = list(generate_dialogues(HELD_OUT_SEED, arguments.sessions))
            start = time.perf_counter()
            logs = await run_sessions(client, dialogues, rate_per_s=arguments.rate, seed=arguments.seed)
            report = summarise(logs, wall_s=time.perf_counter() - start, **limits)
            reports.append(
                {
                    "workload": "sessions",
                    "rate_per_s": arguments.rate,
                    "sessions": arguments.sessions,
                    **report,
                }
            )
    return reports


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = bench_parser("serve", __doc__)
    _add_cluster(parser)
    _add_load(parser)
    arguments = parser.parse_args(argv)
    if not arguments.up and (arguments.model or arguments.make):
        parser.error("--model and --make need --up: a running cluster has its model")
    if arguments.drafts and (not arguments.up or arguments.model or arguments.make):
        parser.error("--drafts needs --up and the shipped model, whose draft head it uses")
    if min(arguments.rate, arguments.sessions, arguments.output_tokens) <= 0:
        parser.error("--rate, --sessions and --output-tokens must be more than 0")
    if arguments.prompt_tokens and not arguments.streams:
        arguments.lengths = arguments.prompt_tokens
    elif len(arguments.prompt_tokens) > 1:
        parser.error("--streams takes one number of --prompt-tokens")
    arguments.prompt_tokens = arguments.prompt_tokens or [_PROMPT_TOKENS]
    return arguments


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    """The cluster under load: a running one, or a new one for this run."""
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--endpoint", default="127.0.0.1:7000", help="gRPC address of a running router")
    target.add_argument(
        "--up", action="store_true", help="start a cluster for this run and stop it afterwards"
    )
    parser.add_argument(
        "--model", type=Path, help="with --up: checkpoint directory (default: the shipped model)"
    )
    parser.add_argument(
        "--make",
        type=Path,
        metavar="DIR",
        help="with --up: write a random checkpoint of bench.engine's shape there, and use it",
    )
    parser.add_argument("--prefill", type=int, default=1, help="with --up: prefill workers")
    parser.add_argument("--decode", type=int, default=1, help="with --up: decode workers")
    parser.add_argument("--no-drafts", action="store_true", help="with --up: run without the drafter")


def _add_load(parser: argparse.ArgumentParser) -> None:
    """The workload, and the limits of goodput."""
    parser.add_argument(
        "--rate", type=float, default=2.0, help="sessions arriving a second (default: %(default)s)"
    )
    parser.add_argument(
        "--sessions", type=int, default=40, help="how many arrive in all (default: %(default)s)"
    )
    parser.add_argument(
        "--streams",
        type=stream_counts,
        default=[],
        metavar="N[,N..]",
        help="run this closed-loop workload instead, e.g. 1,8,32",
    )
    parser.add_argument(
        "--requests", type=int, default=8, help="requests of a closed-loop run, at least 2 a stream"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=prompt_lengths,
        default=[],
        metavar="N[,N..]",
        help=f"of each prompt, about (default: {_PROMPT_TOKENS}); without --streams: measure these lengths",
    )
    parser.set_defaults(lengths=[])
    parser.add_argument("--output-tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--ttft-limit-ms", type=float, default=1000.0, help="goodput: TTFT at most this")
    parser.add_argument("--itl-limit-ms", type=float, default=50.0, help="goodput: mean ITL at most this")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals and prompts")
    parser.add_argument(
        "--drafts",
        type=drafts_ways,
        default=[],
        metavar="WAY[,WAY..]",
        help="with --up: compare off, on and auto, each also with :local or :remote",
    )
    parser.add_argument("--rounds", type=int, default=3, help="with --drafts: turns of each way")
    parser.add_argument(
        "--pace-ms", type=float, default=0.0, help="with --drafts: a decode step takes at least this"
    )


def drafts_ways(text: str) -> list[DraftsWay]:
    """Parse `off,auto,on:local`. Raises ArgumentTypeError."""
    try:
        return [DraftsWay.parse(part) for part in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def stream_counts(text: str) -> list[int]:
    """Parse `1,8,32`. Raises ArgumentTypeError for anything else, and for numbers below 1."""
    return _numbers(text, "stream counts such as 1,8,32")


def prompt_lengths(text: str) -> list[int]:
    """Parse `8192,32768`, as `stream_counts`."""
    return _numbers(text, "prompt lengths such as 8192,32768")


def _numbers(text: str, what: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {what}")
    return [int(part) for part in parts]


async def run_up(arguments: argparse.Namespace, run_dir: Path) -> list[dict[str, Any]]:
    """Start a cluster, and `run` on it."""
    drafts = arguments.model is None and not arguments.no_drafts
    if arguments.drafts:
        runs = DraftRuns(
            ways=arguments.drafts,
            streams=arguments.streams or (1, 4, 16),
            rounds=arguments.rounds,
            turns=3 * arguments.requests,
            pace_ms=arguments.pace_ms,
        )
        return await compare_drafts(runs, run_dir)
    model = arguments.model or DEFAULT_MODEL
    if arguments.lengths:
        room = max(arguments.lengths) * 5 // 4 + 4 * arguments.output_tokens + 1024
        model = long_context_model(model, run_dir / "model", room)
    config = ClusterConfig(
        run_dir=run_dir,
        model=model,
        draft_model=DEFAULT_DRAFT_MODEL if drafts else None,
        prefill=arguments.prefill,
        decode=arguments.decode,
        drafters=None if drafts else 0,
    )
    async with ClusterSupervisor(config, say=say) as cluster:
        record = cluster.record()
        return await run(arguments, record.router_grpc, record)


def main(argv: Sequence[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    if any(word.partition("=")[0] in ("--compare", "--affinity") for word in given):
        headline.main(given)
        return
    arguments = parse(given)
    if arguments.make is not None:
        from bench.serve.model import make_serve_model

        make_serve_model(arguments.make)
        arguments.model = arguments.make
    try:
        if arguments.up:
            with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
                reports = asyncio.run(run_up(arguments, Path(folder)))
        else:
            reports = asyncio.run(run(arguments, arguments.endpoint))
    except SlipstreamError as error:
        sys.exit(f"bench.serve: {error.message}")
    if arguments.json:
        print(json.dumps({"runs": reports}))
    elif arguments.lengths:
        print(as_table(reports))
    else:
        for report in reports:
            print(json.dumps(report, indent=2))
    if any(report["failed"] for report in reports):
        sys.exit(1)


if __name__ == "__main__":
    main()

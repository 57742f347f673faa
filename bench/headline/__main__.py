"""What separate tiers, or session affinity, change for agents, on the same processes and cores in turn.

    python -m bench.headline --compare tiers,colocated --rates 0.1,0.2,0.3
    python -m bench.headline --compare affinity --prefill 2

A model of random weights (bench.engine's shape) serves sessions of agents, which arrive as a Poisson process.
Each variant gets a new cluster and the same arrivals, `--rounds` times in turn; the table has medians. Each
worker has one thread, and one core where there are enough. Drafts are off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.command_line import bench_parser
from bench.headline.agents import AgentLoad, run_agents
from bench.headline.report import as_table, compare, knee
from bench.headline.variants import COMPARISONS, Variant, cluster_of, options_of, set_cores
from bench.progress import say
from bench.request_log import summarise
from bench.serve.model import make_serve_model
from libs.common.cluster.worker_record import Role
from slipstream.async_client import AsyncClient
from slipstream.errors import SlipstreamError
from supervisor.cluster import ClusterSupervisor

# Goodput "begins to fall" where less than this share of requests is within the limits.
FALLING_SHARE = 0.95
WARM_UP_WORDS = 200


async def measure_variant(
    variant: Variant, load: AgentLoad, arguments: argparse.Namespace, model: Path
) -> dict[str, Any]:
    """One run of a variant on a new cluster."""
    with tempfile.TemporaryDirectory(prefix="slipstream-headline-") as folder:
        config = cluster_of(
            variant,
            run_dir=Path(folder),
            model=model,
            prefill=arguments.prefill,
            decode=arguments.decode,
        )
        async with ClusterSupervisor(config, say=say) as cluster:
            record = cluster.record()
            workers = [p for p in record.processes if p.role in (Role.PREFILL, Role.DECODE)]
            has_cores = set_cores([p.pid for p in workers if p.pid is not None])
            options = options_of(variant, [p.instance for p in workers if p.role == Role.PREFILL])
            async with AsyncClient(record.router_grpc, max_retries=0) as client:
                warm_up = AgentLoad(1.0, 1, 1, WARM_UP_WORDS, 1, 8, 0.0, seed=load.seed + 1)
                (warm,) = await run_agents(client, warm_up, options)
                load = replace(load, tokens_per_word=max(1, warm.prompt_tokens) / WARM_UP_WORDS)
                began_s = time.perf_counter()
                logs = await run_agents(client, load, options)
                wall_s = time.perf_counter() - began_s
    limits = {"ttft_limit_ms": arguments.ttft_limit_ms, "itl_limit_ms": arguments.itl_limit_ms}
    return {"variant": variant.name, "a_core_each": has_cores, **summarise(logs, wall_s=wall_s, **limits)}


async def run(arguments: argparse.Namespace, model: Path) -> dict[str, Any]:
    """All rates and rounds; returns the reports and their comparison by rate."""
    variants = COMPARISONS[arguments.compare]
    names = [variant.name for variant in variants]
    results: dict[str, Any] = {"compare": names, "rates": {}}
    by_rate = {}
    for rate in arguments.rates:
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for round_ in range(arguments.rounds):
            load = AgentLoad(
                rate,
                arguments.sessions,
                arguments.turns,
                arguments.first_prompt_tokens,
                arguments.turn_tokens,
                arguments.output_tokens,
                arguments.think_s,
                seed=arguments.seed + round_,
            )
            for variant in variants if round_ % 2 == 0 else reversed(variants):
                runs[variant.name].append(await measure_variant(variant, load, arguments, model))
        rows = by_rate[rate] = compare(runs[names[0]], runs[names[1]])
        results["rates"][str(rate)] = {"rows": rows, "runs": runs}
        say(f"\n{rate:g} sessions a second\n{as_table(names, rows)}\n")
    results["goodput_falls_at"] = knee(by_rate, least_share=FALLING_SHARE)
    return results


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = bench_parser("headline", __doc__)
    add = parser.add_argument
    add(
        "--compare",
        choices=sorted(COMPARISONS),
        default="tiers,colocated",
        metavar="WHAT",
        help="tiers,colocated (the default) or affinity",
    )
    add("--affinity", choices=["on,off"], help="the same as --compare affinity")
    add("--rates", type=_rates, default=[0.1, 0.2], help="sessions that arrive a second, e.g. 0.1,0.2")
    add("--rounds", type=int, default=2, help="runs of each variant at each rate (default: %(default)s)")
    add("--sessions", type=int, default=10, help="of one run (default: %(default)s)")
    add("--turns", type=int, default=10, help="of a session (default: %(default)s)")
    add("--first-prompt-tokens", type=int, default=1500, help="about (default: %(default)s)")
    add("--turn-tokens", type=int, default=150, help="that each turn adds, about (default: %(default)s)")
    add("--output-tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    add("--think-s", type=float, default=0.5, help="between the turns of a session (default: %(default)s)")
    add("--prefill", type=int, default=1, help="prefill workers of the separate tiers")
    add("--decode", type=int, default=1, help="decode workers of the separate tiers")
    add("--ttft-limit-ms", type=float, default=4000.0, help="goodput: TTFT at most this")
    add("--itl-limit-ms", type=float, default=50.0, help="goodput: mean time per token at most this")
    add("--model", type=Path, help="a checkpoint instead of the random one")
    add("--seed", type=int, default=0, help="of arrivals and prompts")
    arguments = parser.parse_args(argv)
    if arguments.affinity:
        arguments.compare = "affinity"
    return arguments


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or min(rates) <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of rates such as 0.1,0.2")
    return rates


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    with tempfile.TemporaryDirectory(prefix="slipstream-headline-model-") as folder:
        model = arguments.model or Path(folder)
        if arguments.model is None:
            make_serve_model(model)
        try:
            results = asyncio.run(run(arguments, model))
        except SlipstreamError as error:
            sys.exit(f"bench.headline: {error.message}")
    if arguments.json:
        print(json.dumps(results))
    elif (falls_at := results["goodput_falls_at"]) is not None:
        print(f"the goodput of {results['compare'][1]} falls from {falls_at:g} sessions a second on")
    runs = [r for at in results["rates"].values() for reports in at["runs"].values() for r in reports]
    if any(report["failed"] for report in runs):
        sys.exit(1)


if __name__ == "__main__":
    main()

"""The router alone: fake workers behind it, load before it, its CPU measured from outside.

    python -m bench.router --json
    python -m bench.router --processes 2 --only throughput
    python -m bench.router --openai-port 9900 --peer http://127.0.0.1:30000   # another router, same fakes

Router, workers (`bench/router_worker.py`) and load are separate processes, all on this machine. Prints

    latency      TTFT and time per request added over calling the workers directly, at 1, 8, 32, 200 streams:
                 `together`, all begin in the same moment and again when they end; `steady`, each at a moment
                 of its own
    throughput   requests/s, CPU of the router per request, TTFT, with workers of a 1 ms step
    sessions     CPU of the router per request at 1k and 32k prompt tokens, first turn and tenth turn, by face
    tokens       streamed tokens/s, and per second of router CPU
    cancel       milliseconds from a client's cancel until no worker holds anything of its request

CPU is read from the process's own clock: other load on the machine changes wall times, hardly these. That
of the workers and of the load itself is printed beside the router's: on two cores they compete with it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from bench.load import percentiles
from bench.router_cancel import cancel_one
from bench.router_http import HttpTarget
from bench.router_load import GrpcTarget, WorkerTarget, closed_loop
from bench.router_rig import RouterUnderTest, under_test
from bench.router_stream import StreamLog
from bench.serve import WORDS
from libs.text.tokenizer import Tokenizer
from slipstream.supervisor.plan import DEFAULT_MODEL

Report = dict[str, Any]
PARTS = ("latency", "throughput", "sessions", "tokens", "cancel")
_DIRECT_PROMPT = range(100, 200)
_MOST_IN_A_ROW = 6  # requests of a stream of the latency part: one stream must not take all the time


def words(count: int, seed: int) -> str:
    """Text of `count` words."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def tokens_per_word() -> float:
    """Of the shipped tokenizer."""
    return len(Tokenizer.from_dir(DEFAULT_MODEL).encode_text(words(1000, 0))) / 1000


def chat(text: str) -> list[dict[str, str]]:
    """One user message."""
    return [{"role": "user", "content": text}]


def targets_of(test: RouterUnderTest, arguments: argparse.Namespace, *, peer: bool = False) -> dict[str, Any]:
    """The faces asked for, and the other router if there is one. The caller closes them."""
    targets: dict[str, Any] = {}
    if "grpc" in arguments.faces:
        # The kernel spreads connections over processes at random: several each, so that all have some.
        connections = 1 if arguments.processes == 1 else 8 * arguments.processes
        targets["grpc"] = GrpcTarget(test.grpc, connections=connections)
    if "http" in arguments.faces:
        targets["http"] = HttpTarget(f"http://{test.http}")
    if peer and arguments.peer:
        targets["peer"] = HttpTarget(arguments.peer, model="bench")
    return targets


# ---- the parts


async def latency(test: RouterUnderTest, arguments: argparse.Namespace) -> Report:
    """What the router adds at each number of streams, over gRPC and HTTP."""
    tokens, report = arguments.output_tokens, []
    prompts = [chat(words(64, seed)) for seed in range(64)]
    direct = WorkerTarget(test.prefill, test.decode, test.fingerprint)
    targets = targets_of(test, arguments, peer=True)
    if arguments.openai_port:
        targets["worker_http"] = HttpTarget(f"http://127.0.0.1:{arguments.openai_port}", model="bench")
    ways: dict[str, Callable[[int], Awaitable[StreamLog]]] = {
        "direct": lambda index: direct.stream(_DIRECT_PROMPT, max_tokens=tokens)
    }
    for name, target in targets.items():

        async def through(index: int, target: Any = target) -> StreamLog:
            log: StreamLog = await target.stream(prompts[index % 64], max_tokens=tokens)
            return log

        ways[name] = through
    for streams in arguments.streams:
        row: Report = {"streams": streams}
        requests = max(streams * 2, min(arguments.requests, streams * _MOST_IN_A_ROW))
        spread_s = (arguments.prefill_ms + tokens * arguments.step_ms) / 1e3
        for pattern, begin_s in (("together", 0.0), ("steady", spread_s)):
            found: Report = {}
            for name, one in ways.items():
                await closed_loop(one, streams=min(streams, 8), requests=min(streams, 8))
                found[name] = await measured(
                    test, one, streams=streams, requests=requests, tokens=tokens, spread_s=begin_s
                )
            row[pattern] = found | {f"added_by_{name}_ms": _added(found, name) for name in targets}
        report.append(row)
    for target in (direct, *targets.values()):
        await target.close()
    return {"output_tokens": tokens, "levels": report}


def _added(found: Report, name: str) -> Report:
    """Beyond calling the workers directly, in the same pattern."""
    base = found["worker_http"] if name == "peer" and "worker_http" in found else found["direct"]
    return {
        f"{what}_{p}": round(found[name][f"{what}_ms"][p] - base[f"{what}_ms"][p], 2)
        for what in ("ttft", "total")
        for p in ("p50", "p99")
    }


async def throughput(test: RouterUnderTest, arguments: argparse.Namespace) -> Report:
    """Requests of 32 tokens, 32 at a time, workers that prefill at once and step in a millisecond."""
    report: Report = {}
    targets = targets_of(test, arguments, peer=True)
    for name, target in targets.items():

        async def one(index: int, target: Any = target) -> StreamLog:
            log: StreamLog = await target.stream(chat(words(64, index)), max_tokens=32)
            return log

        await closed_loop(one, streams=8, requests=32)
        report[name] = await measured(test, one, streams=32, requests=arguments.requests * 16, tokens=32)
        await target.close()
    return report


async def sessions(test: RouterUnderTest, arguments: argparse.Namespace) -> Report:
    """Sessions of ten turns in step: all first turns, all second turns and so on."""
    report: Report = {}
    for nth, (face, target) in enumerate(targets_of(test, arguments).items()):
        found = report[face] = {}
        for prompt_tokens, count in ((1_000, 32), (32_000, 12)):
            n_words = round(prompt_tokens / tokens_per_word())
            talks = [chat(words(n_words, 100 * nth + seed)) for seed in range(count)]
            for turn in range(1, 11):

                async def one(
                    index: int, target: Any = target, talks: Any = talks, face: str = face
                ) -> StreamLog:
                    session = f"{face}-{len(talks)}-{index}"
                    log: StreamLog = await target.stream(
                        talks[index], max_tokens=8, session=session, want_text=True
                    )
                    talks[index] += [{"role": "assistant", "content": log.text}]
                    talks[index] += chat(words(50, index))
                    return log

                row = await measured(test, one, streams=4, requests=count, tokens=8)
                if turn in (1, 10):
                    found[f"{prompt_tokens}_tokens_turn_{turn}"] = row
        await target.close()
    return report


async def tokens(test: RouterUnderTest, arguments: argparse.Namespace) -> Report:
    """Long answers from a decode worker that does not wait between steps."""
    report: Report = {}
    for name, target in targets_of(test, arguments).items():

        async def one(index: int, target: Any = target) -> StreamLog:
            log: StreamLog = await target.stream(chat(words(64, index)), max_tokens=arguments.long_tokens)
            return log

        row = await measured(test, one, streams=64, requests=64, tokens=arguments.long_tokens)
        row["tokens_per_router_cpu_s"] = round(1e3 * arguments.long_tokens / row["router_cpu_ms_per_request"])
        report[name] = row
        await target.close()
    return report


async def cancel(test: RouterUnderTest, arguments: argparse.Namespace) -> Report:
    """From a client's cancel to empty ledgers, before and after its first token."""
    endpoints = {"prefill-0": test.prefill, "decode-0": test.decode, "router-0": test.grpc}
    target = GrpcTarget(test.grpc)
    report: Report = {}
    for name, deltas in (("in_prefill_ms", 0), ("in_decode_ms", 3)):
        times = [
            await cancel_one(target.open(chat(words(64, index)), max_tokens=4000), endpoints, deltas=deltas)
            for index in range(max(arguments.requests // 4, 4))
        ]
        report[name] = percentiles(times)
    await target.close()
    return report


async def measured(
    test: RouterUnderTest,
    one: Callable[[int], Awaitable[StreamLog]],
    *,
    streams: int,
    requests: int,
    tokens: int,
    spread_s: float = 0.0,
) -> Report:
    """Run and sum up; with `spread_s` (see `closed_loop`) only times and numbers of messages mean anything.
    Raises RuntimeError when a stream lacks tokens."""

    def clocks() -> tuple[float, ...]:
        return test.cpu_s(), test.workers_cpu_s(), time.process_time(), time.monotonic()

    before = clocks()
    logs = await closed_loop(one, streams=streams, requests=requests, spread_s=spread_s)
    cpu_s, workers_s, load_s, wall_s = (now - then for now, then in zip(clocks(), before, strict=True))
    wrong = [log for log in logs if log.error or log.completion_tokens != tokens]
    if wrong:
        raise RuntimeError(f"{len(wrong)} of {len(logs)} streams failed, the first: {wrong[0]}")
    of_all: Report = {
        "requests_per_s": round(requests / wall_s, 1),
        "router_cpu_ms_per_request": round(cpu_s * 1e3 / requests, 3),
        "workers_cpu_ms_per_request": round(workers_s * 1e3 / requests, 3),
        "load_cpu_ms_per_request": round(load_s * 1e3 / requests, 3),
        "tokens_per_s": round(requests * tokens / wall_s),
    }
    return {
        "streams": streams,
        "requests": requests,
        **({} if spread_s else of_all),
        "messages_per_stream": round(sum(len(log.arrivals) for log in logs) / requests, 1),
        "ttft_ms": percentiles([log.ttft_ms for log in logs]),
        "total_ms": percentiles([log.total_ms for log in logs]),
        "router_loop_delay_ms": await test.loop_delay_ms(),
    }


async def run(arguments: argparse.Namespace, folder: Path) -> Report:
    """All parts asked for."""
    report: Report = {"router_processes": arguments.processes, "known": KNOWN}
    parts: dict[str, tuple[Callable[..., Awaitable[Report]], float, float]] = {
        "latency": (latency, arguments.prefill_ms, arguments.step_ms),
        "throughput": (throughput, 0.0, 1.0),
        "sessions": (sessions, 0.0, 0.0),
        "tokens": (tokens, 0.0, 0.0),
        "cancel": (cancel, 500.0, 20.0),
    }
    for name in arguments.only:
        part, prefill_ms, step_ms = parts[name]
        async with under_test(arguments, folder, prefill_ms=prefill_ms, step_ms=step_ms) as test:
            report[name] = await part(test, arguments)
    return report


# Another router, measured earlier on two cores like these: context, not part of the run.
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
        prog="bench.router", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", type=lambda text: text.split(","), default=list(PARTS), help=f"of {', '.join(PARTS)}")
    add("--faces", type=lambda text: text.split(","), default=["grpc", "http"], help="of grpc, http")
    add("--streams", type=numbers, default=[1, 8, 32, 200], help="levels of the latency part")
    add("--requests", type=int, default=64, help="requests of a level, 2 to 6 a stream")
    add("--output-tokens", type=int, default=32, help="of each request of the latency part")
    add("--long-tokens", type=int, default=4000, help="of each request of the tokens part")
    add("--prefill-ms", type=float, default=20.0, help="pace of the fake workers in the latency part")
    add("--step-ms", type=float, default=20.0, help="pace of the fake workers in the latency part")
    add("--processes", type=int, default=1, help="router processes on one port")
    add("--peer", help="URL of another OpenAI-style router before the fakes of --openai-port")
    add("--openai-port", type=int, default=0, help="fakes serve OpenAI-style HTTP here too")
    add("--profile", action="store_true", help="profile the router; it prints where its time went")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    arguments = parse(argv)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as folder:
        report = asyncio.run(run(arguments, Path(folder)))
    print(json.dumps(report, indent=None if arguments.json else 2))


if __name__ == "__main__":
    main()

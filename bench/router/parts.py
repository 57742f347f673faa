"""The parts of `bench.router`: the load of each, and its figures."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.request_log import percentiles
from bench.router.http_client import HttpTarget
from bench.router.load import GrpcTarget, WorkerTarget, closed_loop
from bench.router.ratio import SMG, median_row, ratios
from bench.router.rig import RouterUnderTest
from bench.router.smg import SmgUnderTest
from bench.router.stream import StreamLog
from bench.serve.workloads import WORDS
from libs.text.tokenizer import Tokenizer
from supervisor.configuration.cluster_options import DEFAULT_MODEL

Report = dict[str, Any]
_DIRECT_PROMPT = range(100, 200)
_MAX_PER_STREAM = 6  # requests of a stream in the latency part, to bound the time of one stream


def words(count: int, seed: int) -> str:
    """Text of `count` words."""
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def tokens_per_word() -> float:
    """The mean of the shipped tokenizer."""
    return len(Tokenizer.from_dir(DEFAULT_MODEL).encode_text(words(1000, 0))) / 1000


def chat(text: str) -> list[dict[str, str]]:
    """One user message."""
    return [{"role": "user", "content": text}]


@dataclass(frozen=True, slots=True)
class Rig:
    """Our router and, where SMG is measured too, SMG; only one of them has load at a time."""

    ours: RouterUnderTest
    smg: SmgUnderTest | None = None

    def of(self, target: str) -> RouterUnderTest | SmgUnderTest:
        """The router behind a target."""
        return self.smg if target == SMG and self.smg is not None else self.ours


def targets_of(rig: Rig, arguments: argparse.Namespace) -> dict[str, Any]:
    """The endpoints to measure, by name; SMG where it is measured too. The caller closes them."""
    test = rig.ours
    targets: dict[str, Any] = {}
    if "grpc" in arguments.api:
        # The kernel spreads connections over processes at random: with several each, all have some.
        connections = 1 if arguments.processes == 1 else 8 * arguments.processes
        targets["grpc"] = GrpcTarget(test.grpc, connections=connections)
    if "http" in arguments.api:
        targets["http"] = HttpTarget(f"http://{test.http}")
    if rig.smg is not None:
        targets[SMG] = HttpTarget(rig.smg.url, model="bench")
    return targets


# ---- the parts


async def latency(rig: Rig, arguments: argparse.Namespace) -> Report:
    """Measure the time that the router adds at each number of streams, over gRPC and HTTP."""
    tokens, report, test = arguments.output_tokens, [], rig.ours
    prompts = [chat(words(64, seed)) for seed in range(64)]
    direct = WorkerTarget(test.prefill, test.decode, test.fingerprint, test.operator_dial)
    targets = targets_of(rig, arguments)
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
        requests = max(streams * 2, min(arguments.requests, streams * _MAX_PER_STREAM))
        spread_s = (arguments.prefill_ms + tokens * arguments.step_ms) / 1e3
        for pattern, begin_s in (("together", 0.0), ("steady", spread_s)):
            load = {"streams": streams, "requests": requests, "tokens": tokens, "spread_s": begin_s}
            found = await in_turn(rig, ways, arguments.rounds, warm_up=min(streams, 8), **load)
            for of_way in found.values():
                of_way["beyond_prefill_ms"] = {
                    p: round(of_way["ttft_ms"][p] - arguments.prefill_ms, 2) for p in ("p50", "p99")
                }
            added = {f"added_by_{name}_ms": _added(found, name) for name in targets}
            row[pattern] = found | added | ratios({name: found[name] for name in targets})
        report.append(row)
    for target in (direct, *targets.values()):
        await target.close()
    return {"output_tokens": tokens, "levels": report}


def _added(found: Report, name: str) -> Report:
    """Milliseconds beyond direct calls to the workers, in the same pattern."""
    return {
        f"{what}_{p}": round(found[name][f"{what}_ms"][p] - found["direct"][f"{what}_ms"][p], 2)
        for what in ("ttft", "total")
        for p in ("p50", "p99")
    }


async def throughput(rig: Rig, arguments: argparse.Namespace) -> Report:
    """Run requests of 32 tokens, 32 and one at a time; workers prefill at once and step in 1 ms."""
    targets = targets_of(rig, arguments)
    ways: dict[str, Callable[[int], Awaitable[StreamLog]]] = {}
    for name, target in targets.items():

        async def one(index: int, target: Any = target) -> StreamLog:
            log: StreamLog = await target.stream(chat(words(64, index)), max_tokens=32)
            return log

        ways[name] = one
    requests, rounds = arguments.requests, arguments.rounds
    found = await in_turn(rig, ways, rounds, warm_up=32, streams=32, requests=requests * 16, tokens=32)
    alone = await in_turn(rig, ways, rounds, warm_up=2, streams=1, requests=requests // 2, tokens=32)
    for target in targets.values():
        await target.close()
    return {**found, **ratios(found), "one_at_a_time": alone | ratios(alone)}


async def in_turn(
    rig: Rig,
    ways: Mapping[str, Callable[[int], Awaitable[StreamLog]]],
    rounds: int,
    *,
    warm_up: int,
    streams: int,
    **load: Any,
) -> Report:
    """Run each way in each round, so that other load on the machine affects all; medians of the rounds."""
    rows: dict[str, list[Report]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, one in ways.items():
            await closed_loop(one, streams=min(streams, 8), requests=warm_up)
            rows[name].append(await measured(rig.of(name), one, streams=streams, **load))
    return {name: median_row(of_rounds) for name, of_rounds in rows.items()}


async def sessions(rig: Rig, arguments: argparse.Namespace) -> Report:
    """Run sessions of ten turns in step: the first turn of all by each API, the second of all, and so on."""
    targets = targets_of(rig, arguments)
    report: Report = {api: {} for api in targets}
    for prompt_tokens, count in ((1_000, 32), (32_000, 12)):
        n_words = round(prompt_tokens / tokens_per_word())
        talks = {
            api: [chat(words(n_words, 100 * nth + seed)) for seed in range(count)]
            for nth, api in enumerate(targets)
        }
        for turn in range(1, 11):
            for api, target in targets.items():

                async def one(
                    index: int, target: Any = target, talks: Any = talks[api], api: str = api
                ) -> StreamLog:
                    session = f"{api}-{len(talks)}-{index}"
                    log: StreamLog = await target.stream(
                        talks[index], max_tokens=8, session=session, want_text=True
                    )
                    talks[index] += [{"role": "assistant", "content": log.text}]
                    talks[index] += chat(words(50, index))
                    return log

                row = await measured(rig.of(api), one, streams=4, requests=count, tokens=8)
                if turn in (1, 10):
                    report[api][f"{prompt_tokens}_tokens_turn_{turn}"] = row
    for target in targets.values():
        await target.close()
    for turn in report[SMG] if rig.smg is not None else ():
        of_turn = ratios({api: report[api][turn] for api in targets})
        report.setdefault("ratio_to_smg", {})[turn] = of_turn["ratio_to_smg"]
    return report


async def tokens(rig: Rig, arguments: argparse.Namespace) -> Report:
    """Run long answers from a decode worker that does not wait between steps."""
    report: Report = {}
    for name, target in targets_of(rig, arguments).items():

        async def one(index: int, target: Any = target) -> StreamLog:
            log: StreamLog = await target.stream(chat(words(64, index)), max_tokens=arguments.long_tokens)
            return log

        row = await measured(rig.of(name), one, streams=64, requests=64, tokens=arguments.long_tokens)
        row["tokens_per_router_cpu_s"] = round(1e3 * arguments.long_tokens / row["router_cpu_ms_per_request"])
        report[name] = row
        await target.close()
    return report | ratios(report)


async def measured(
    test: RouterUnderTest | SmgUnderTest,
    one: Callable[[int], Awaitable[StreamLog]],
    *,
    streams: int,
    requests: int,
    tokens: int,
    spread_s: float = 0.0,
) -> Report:
    """Run a closed loop and summarise it; `spread_s` (see `closed_loop`) leaves rates and CPU out.

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

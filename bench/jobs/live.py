"""TTFT of live requests with and without queued jobs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
from pathlib import Path

from bench.progress import say
from bench.request_log import RequestLog, percentiles
from bench.serve.workloads import WORDS, measure
from slipstream.async_client import AsyncClient
from slipstream.jobs.messages import JobOptions
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.plan import ClusterConfig


async def measure_live(options: argparse.Namespace) -> dict[str, object]:
    """TTFT of live requests, in rounds with and without queued jobs."""
    without: list[RequestLog] = []
    beside: list[RequestLog] = []
    ended = 0
    with tempfile.TemporaryDirectory() as run_dir:
        config = ClusterConfig(run_dir=Path(run_dir), decode=1, draft_model=None, drafters=0)
        async with contextlib.AsyncExitStack() as stack:
            supervisor = ClusterSupervisor(config, say=say)
            cluster = await stack.enter_async_context(supervisor)
            client = await stack.enter_async_context(AsyncClient(cluster.record().router_grpc))
            await _round(client, options, seed=0)  # warms caches and forecasts
            for number in range(options.rounds):
                if number % 2 == 0:
                    without += await _round(client, options, seed=number + 1)
                    continue
                group = f"bench-{number}"
                await client.jobs.submit(_bodies(options.queued, number), options=JobOptions(group_id=group))
                beside += await _round(client, options, seed=number + 1)
                ended += options.queued - await client.jobs.cancel(group_id=group)
                await asyncio.sleep(3.0)  # until the jobs that ran have stopped
    ratio = _p99(beside) / _p99(without) if without and beside else float("nan")
    return {
        "queued_jobs": options.queued,
        "jobs_ended_meanwhile": ended,
        "requests": len(without) + len(beside),
        "failed": sum(bool(log.error) for log in (*without, *beside)),
        "rate_per_s": options.rate,
        "ttft_ms_without_jobs": _ttft(without),
        "ttft_ms_with_jobs": _ttft(beside),
        "p99_ratio": round(ratio, 3),
    }


async def _round(client: AsyncClient, options: argparse.Namespace, *, seed: int) -> list[RequestLog]:
    """Open loop: requests arrive at a fixed rate, each with another prompt."""
    random_ = random.Random(seed)
    tasks = []
    for _ in range(options.requests):
        prompt = " ".join(random_.choices(WORDS, k=96))
        stream = client.stream_complete(prompt, temperature=0.0, max_tokens=24, ignore_eos=True)
        tasks.append(asyncio.create_task(measure(stream)))
        await asyncio.sleep(1 / options.rate)
    return list(await asyncio.gather(*tasks))


def _bodies(count: int, seed: int) -> list[dict[str, object]]:
    random_ = random.Random(1000 + seed)
    texts = [" ".join(random_.choices(WORDS, k=96)) for _ in range(count)]
    return [{"messages": [{"role": "user", "content": text}], "max_tokens": 48} for text in texts]


def _ttft(logs: list[RequestLog]) -> dict[str, float]:
    return percentiles([ms for log in logs if (ms := log.ttft_ms) is not None])


def _p99(logs: list[RequestLog]) -> float:
    return _ttft(logs).get("p99", float("nan"))

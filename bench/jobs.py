"""Jobs: claims a second on SQLite, and what 1,000 queued jobs cost live requests.

    python -m bench.jobs --json
    python -m bench.jobs --only claims

Claims: owners on one file, as many routers would be, claim and end all jobs. Live: streams arrive in a
fixed rhythm at a local cluster; rounds without jobs and with 1,000 queued jobs alternate, so that both
sides see the same machine. Prints TTFT and their ratio at p99 (at most 1.1; claims: at least 1,000).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from bench.load import RequestLog, percentiles
from bench.serve import WORDS, measure
from libs.database.database import Database, open_database
from services.router.jobs.leases import JobLeases
from services.router.jobs.store import JobStore
from services.router.jobs.types import JobOutcome, JobRequest, JobState
from slipstream.async_client import AsyncClient
from slipstream.jobs.messages import JobOptions
from supervisor.cluster import ClusterSupervisor
from supervisor.plan import ClusterConfig

_CHAT = "/v1/chat/completions"
_BODY_BYTES = 4096
_DONE = JobOutcome(200, b'{"choices": []}' * 20)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.jobs", description=__doc__)
    parser.add_argument("--only", choices=("claims", "live"))
    parser.add_argument("--jobs", type=int, default=4000, help="to claim")
    parser.add_argument("--owners", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="jobs of one claim")
    parser.add_argument("--queued", type=int, default=1000, help="jobs beside live requests")
    parser.add_argument("--rounds", type=int, default=4, help="of live requests, half with jobs")
    parser.add_argument("--requests", type=int, default=40, help="of one round")
    parser.add_argument("--rate", type=float, default=2.0, help="live requests a second")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


# ---- claims


async def measure_claims(options: argparse.Namespace) -> dict[str, object]:
    """Claim all jobs, then claim and end as many."""
    with tempfile.TemporaryDirectory() as folder:
        database = open_database(f"sqlite:{folder}/jobs.db")
        store = JobStore(database, wall_clock_s=time.time)
        owners = [f"owner-{index}" for index in range(options.owners)]
        leases = JobLeases(database, wall_clock_s=time.time)
        for owner in owners:
            await leases.register(owner)
        submitted_s = await _submit(store, options.jobs)
        claimed_s = await _drain(leases, owners, options, ends=False)
        for owner in owners:
            await leases.resign(owner)
            await leases.register(owner)
        ended_s = await _drain(leases, owners, options, ends=True)
        counts = await store.counts("bench")
        await _close(database)
    assert counts.succeeded == options.jobs, counts
    return {
        "jobs": options.jobs,
        "owners": options.owners,
        "batch": options.batch,
        "body_bytes": _BODY_BYTES,
        "submits_per_s": round(options.jobs / submitted_s),
        "claims_per_s": round(options.jobs / claimed_s),
        "claims_and_ends_per_s": round(options.jobs / ended_s),
    }


async def _submit(store: JobStore, count: int) -> float:
    began_s = time.perf_counter()
    for begin in range(0, count, 500):
        n = min(500, count - begin)
        bodies = [json.dumps({"prompt": f"{begin + i} ".ljust(_BODY_BYTES)}).encode() for i in range(n)]
        await store.submit("bench", [JobRequest(_CHAT, body) for body in bodies])
    return time.perf_counter() - began_s


async def _drain(leases: JobLeases, owners: list[str], options: argparse.Namespace, *, ends: bool) -> float:
    async def owner_of(owner: str) -> None:
        while jobs := await leases.claim(owner, options.batch):
            if ends:
                await asyncio.gather(*[leases.finish(owner, job, _DONE, JobState.SUCCEEDED) for job in jobs])

    began_s = time.perf_counter()
    await asyncio.gather(*[owner_of(owner) for owner in owners])
    return time.perf_counter() - began_s


async def _close(database: Database) -> None:
    await database.close()


# ---- live requests beside jobs


async def measure_live(options: argparse.Namespace) -> dict[str, object]:
    """TTFT of live requests, in rounds with and without queued jobs."""
    without: list[RequestLog] = []
    beside: list[RequestLog] = []
    ended = 0
    with tempfile.TemporaryDirectory() as run_dir:
        config = ClusterConfig(run_dir=Path(run_dir), decode=1, draft_model=None, drafters=0)
        async with contextlib.AsyncExitStack() as stack:
            supervisor = ClusterSupervisor(config, say=lambda line: print(line, file=sys.stderr))
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


async def run(options: argparse.Namespace) -> dict[str, object]:
    """Both parts."""
    report: dict[str, object] = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
    if options.only != "live":
        report["claims"] = await measure_claims(options)
    if options.only != "claims":
        report["live"] = await measure_live(options)
    return report


def main() -> int:
    """Measure and print."""
    options = parse_options()
    report = asyncio.run(run(options))
    print(json.dumps(report, indent=None if options.json else 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

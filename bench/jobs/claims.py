"""Claims and ends of jobs a second on SQLite, by several owners of one file."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time

from libs.database.database import open_database
from services.router.jobs.leases import JobLeases
from services.router.jobs.store import JobStore
from services.router.jobs.types import JobOutcome, JobRequest, JobState

_CHAT = "/v1/chat/completions"
_BODY_BYTES = 4096
_DONE = JobOutcome(200, b'{"choices": []}' * 20)


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
        await database.close()
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

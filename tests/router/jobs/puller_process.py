"""Runs jobs without a cluster, until it is killed. Each accepted result is a line of the log.

python -m tests.router.jobs.puller_process URL INSTANCE LOG
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from libs.common.telemetry.counters import Counters
from libs.database.database import open_database
from services.router.jobs.decisions import Headroom
from services.router.jobs.leases import JobLeases
from services.router.jobs.puller import JobPuller
from services.router.jobs.types import ClaimedJob, JobOutcome, JobProgress, JobState

LEASE_S, HEARTBEAT_S = 1.5, 0.2


def answer_of(body: bytes) -> bytes:
    """The result of a job in every attempt."""
    return hashlib.blake2b(body).hexdigest().encode()


class HashExecutor:
    """A model that answers with a hash after a few milliseconds."""

    async def check(self, tenant: str, path: str, body: bytes, field: str, *, n_bytes: int) -> int:
        return 0

    async def run(self, job: ClaimedJob) -> JobOutcome:
        answer = answer_of(job.body)
        await asyncio.sleep(answer[0] % 16 / 1e3)
        return JobOutcome(200, answer, output_tokens=1)

    def limit(self, n: int) -> None: ...

    def progress(self) -> Mapping[str, JobProgress]:
        return {}


class LoggedLeases(JobLeases):
    """Writes each accepted result down. The file is unbuffered, so that a kill loses no line."""

    def __init__(self, url: str, log: Path) -> None:
        super().__init__(open_database(url), wall_clock_s=time.time)
        self._log = log.open("ab", buffering=0)

    async def finish(self, owner: str, job: ClaimedJob, outcome: JobOutcome, state: JobState) -> bool:
        is_accepted = await super().finish(owner, job, outcome, state)
        if is_accepted:
            self._log.write(f"{job.id}\n".encode())
        return is_accepted


async def serve(url: str, instance: str, log: Path) -> None:
    """Run jobs for ever."""
    puller = JobPuller(
        LoggedLeases(url, log),
        HashExecutor(),
        instance=instance,
        room=lambda: Headroom(True, 0, 0, 0, 64),
        clock=time.monotonic,
        wall_clock_s=time.time,
        counters=Counters(),
        heartbeat_s=HEARTBEAT_S,
        lease_s=LEASE_S,
    )
    puller.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], sys.argv[2], Path(sys.argv[3])))

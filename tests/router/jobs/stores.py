"""Stores and leases on one database, with a wall clock that tests move."""

from __future__ import annotations

from libs.common.telemetry.counters import Counters
from libs.database.database import Database
from services.router.jobs.leases import JobLeases
from services.router.jobs.store import JobLimits, JobStore
from services.router.jobs.types import ClaimedJob, JobOutcome, JobRequest, JobState

PATH = "/v1/chat/completions"
DONE = JobOutcome(200, b'{"answer": 42}', output_tokens=7)


class JobTables:
    """Both sides of the tables of jobs."""

    def __init__(self, database: Database, limits: JobLimits | None = None) -> None:
        self.database = database
        self.now_s = 1_000_000.0
        self.counters = Counters()
        self.store = JobStore(
            database, wall_clock_s=lambda: self.now_s, limits=limits, counters=self.counters
        )
        self.leases = JobLeases(database, wall_clock_s=lambda: self.now_s)

    async def submit(self, *prompts: str, tenant: str = "alice", **options: object) -> list[str]:
        """Submit one job a prompt; their ids."""
        requests = [make_request(prompt, **options) for prompt in prompts]
        return [job.id for job in await self.store.submit(tenant, requests)]

    async def claim_one(self, owner: str) -> ClaimedJob:
        """The next job."""
        [job] = await self.leases.claim(owner, 1)
        return job

    async def finish(self, owner: str, job: ClaimedJob, outcome: JobOutcome = DONE) -> bool:
        """End a job well."""
        return await self.leases.finish(owner, job, outcome, JobState.SUCCEEDED)


def make_request(prompt: str, **options: object) -> JobRequest:
    """A job with one user message."""
    body = f'{{"messages": [{{"role": "user", "content": "{prompt}"}}]}}'.encode()
    return JobRequest(PATH, body, **options)  # type: ignore[arg-type]

"""The operators' view of all tenants' jobs, without bodies and results, and their way to end jobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from libs.common.telemetry.counters import Counters
from libs.database.database import Database
from libs.database.transaction import SqlTransaction, SqlValue
from services.router.jobs.rows import (
    JOB_COLUMNS,
    count_ended,
    counts_of,
    end_job,
    host_of,
    job_of,
    unknown_job,
)
from services.router.jobs.schema import JOB_SCHEMA
from services.router.jobs.types import Job, JobCounts, JobState

RATE_S = 60.0


@dataclass(frozen=True, slots=True)
class JobSummary:
    """The queue of all tenants. `running_tokens` are those that running jobs have written by now."""

    counts: JobCounts
    ended_per_min: float
    oldest_waiting_s: float | None
    running_tokens: int


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs a page shows. Empty texts let all pass."""

    state: JobState | None = None
    tenant: str = ""
    path: str = ""
    group_id: str = ""
    before: str = ""  # an id; the page begins behind it
    limit: int = 100


@dataclass(frozen=True, slots=True)
class JobWebhook:
    """The webhook of a job. `is_due`: its end is announced and not delivered yet, after so many tries."""

    host: str
    is_due: bool
    tries: int


@dataclass(frozen=True, slots=True)
class JobDetail:
    """A job with what its tenant does not see. `router` runs it."""

    job: Job
    router: str
    failures: int
    not_before_unix_s: float
    stored_bytes: int
    webhook: JobWebhook | None


class JobOverview:
    """The jobs of all tenants, for operators."""

    def __init__(
        self, database: Database, *, wall_clock_s: Callable[[], float], counters: Counters | None = None
    ) -> None:
        database.declare(JOB_SCHEMA)
        self._database = database
        self._now_s = wall_clock_s
        self._counters = counters or Counters()

    async def summary(self) -> JobSummary:
        """The counts, the rate and the age of the queue, each by an index."""
        now_s = self._now_s()

        def read(tx: SqlTransaction) -> JobSummary:
            counts = counts_of(tx.execute("SELECT state, COUNT(*) FROM jobs GROUP BY state"))
            [(ended,)] = tx.execute("SELECT COUNT(*) FROM jobs WHERE ended_unix_s > ?", (now_s - RATE_S,))
            oldest = tx.execute("SELECT created_unix_s FROM jobs WHERE state = 'queued' ORDER BY id LIMIT 1")
            [(tokens,)] = tx.execute(
                "SELECT COALESCE(SUM(output_tokens), 0) FROM jobs WHERE state = 'running'"
            )
            waits_s = max(0.0, now_s - oldest[0][0]) if oldest else None
            return JobSummary(counts, ended * 60.0 / RATE_S, waits_s, int(tokens))

        return await self._database.read(read)

    async def page(self, wanted: JobFilter) -> tuple[list[Job], str | None]:
        """The newest jobs that pass, and the id behind which the next page begins; None after the last."""
        conditions: list[tuple[str, SqlValue]] = [
            ("state = ?", wanted.state.value if wanted.state else ""),
            ("tenant = ?", wanted.tenant),
            ("path = ?", wanted.path),
            ("group_id = ?", wanted.group_id),
            ("id < ?", wanted.before),
        ]
        stated = [each for each in conditions if each[1]]
        where = " AND ".join(condition for condition, _ in stated) or "1 = 1"
        sql = f"SELECT {JOB_COLUMNS} FROM jobs WHERE {where} ORDER BY id DESC LIMIT ?"
        values = (*(value for _, value in stated), wanted.limit + 1)
        rows = await self._database.read(lambda tx: tx.execute(sql, values))
        jobs = [job_of(row) for row in rows[: wanted.limit]]
        return jobs, jobs[-1].id if len(rows) > wanted.limit else None

    async def get(self, job_id: str) -> JobDetail:
        """One job. Raises NotFound."""
        sql = (
            f"SELECT {JOB_COLUMNS}, owner, failures, not_before_unix_s, stored_bytes, webhook_url"
            " FROM jobs WHERE id = ?"
        )

        def read(tx: SqlTransaction) -> JobDetail:
            rows = tx.execute(sql, (job_id,))
            if not rows:
                raise unknown_job(job_id)
            *columns, owner, failures, not_before_s, n_bytes, url = rows[0]
            due = tx.execute("SELECT tries FROM job_notices WHERE id = ?", (f"msg_{job_id}",))
            hook = None
            if url:
                hook = JobWebhook(host_of(url), bool(due), due[0][0] if due else 0)
            router = str(owner).rpartition(".")[0]
            return JobDetail(job_of(columns), router, failures, not_before_s, n_bytes, hook)

        return await self._database.read(read)

    async def cancel(self, job_id: str) -> JobDetail:
        """End a job at once. One that has ended stays as it is. Raises NotFound."""
        now_s = self._now_s()
        is_ended = await self._database.run(
            lambda tx: end_job(tx, job_id, JobState.CANCELLED, now_s=now_s), is_idempotent=True
        )
        count_ended(self._counters, JobState.CANCELLED, int(is_ended))
        return await self.get(job_id)

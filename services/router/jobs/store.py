"""The calls of tenants about jobs: submit, get, list, follow, cancel.

Each submission is one transaction. The calls of routers, which run the jobs, are in leases.py.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from libs.common import job_bounds, service_bounds
from libs.common.telemetry.counters import Counters
from libs.database.database import Database
from libs.database.transaction import SqlTransaction, SqlValue
from services.router.admission.tenant_shares import TenantSlots
from services.router.jobs.decisions import prefix_key
from services.router.jobs.rows import (
    JOB_COLUMNS,
    count_ended,
    counts_of,
    end_job,
    job_of,
    marks,
    unknown_job,
)
from services.router.jobs.schema import JOB_SCHEMA
from services.router.jobs.types import Job, JobCounts, JobRequest, JobResult, JobResultPart, JobState
from slipstream import bounds
from slipstream.errors import FailedPrecondition, InvalidArgument, Overloaded

T = TypeVar("T")
_NEXT_LOOK_S = (0.1, 1.0)  # of a follower: after a change, and the longest
# A tenant's followers of groups look one after the other; each pause is this many times as long as the look.
_LOOK_REST = 3.0
_LOOK_WAIT_S = 3600.0
# Changed in one transaction: others wait for it.
_CANCELLED_AT_ONCE = 100
_RESULTS_BYTES = 1 << 20  # of the answers of one page
_ROW_BYTES = 1024
_PLACES = ", ".join("?" * 26)


@dataclass(frozen=True, slots=True)
class JobLimits:
    """The most that one tenant may have in the database."""

    max_live: int = service_bounds.MAX_TENANT_JOBS
    max_stored_bytes: int = service_bounds.MAX_TENANT_JOB_BYTES


class JobStore:
    """The jobs of all tenants. A job of another tenant does not exist."""

    def __init__(
        self,
        database: Database,
        *,
        wall_clock_s: Callable[[], float],
        limits: JobLimits | None = None,
        counters: Counters | None = None,
    ) -> None:
        database.declare(JOB_SCHEMA)
        self._database = database
        self._now_s = wall_clock_s
        self._limits = limits or JobLimits()
        self._counters = counters or Counters()
        self._last_us = 0  # in the ids of the last submission
        self._looks = TenantSlots(1, wait_s=_LOOK_WAIT_S)

    async def submit(
        self,
        tenant: str,
        requests: Sequence[JobRequest],
        *,
        key_sha256: bytes = b"",
        beside: Callable[[SqlTransaction], None] = lambda _: None,
    ) -> list[Job]:
        """Store jobs, all or none; what is returned survives any crash. They run by the key with this hash.

        `beside` belongs to the same transaction: what it raises stores no job. It may run again.
        Raises InvalidArgument, Overloaded, and FailedPrecondition where an idempotency key has another body.
        """
        check_requests(requests)
        now_s = self._now_s()
        ids = self._new_ids(len(requests), now_s)
        # It parses all bodies.
        rows = await asyncio.to_thread(_new_rows, ids, tenant, requests, now_s, key_sha256.hex())

        def insert(tx: SqlTransaction) -> list[Job]:
            beside(tx)
            return self._insert(tx, tenant, requests, rows)

        return await self._database.run(insert, is_idempotent=True, tenant=tenant, adds_content=True)

    def _new_ids(self, count: int, now_s: float) -> list[str]:
        """Ids in the order of submission. Those of several routers are in the order of their clocks."""
        self._last_us = max(self._last_us + 1, int(now_s * 1e6))
        random = os.urandom(6).hex()
        return [f"job-{self._last_us:014x}{index:04x}{random}" for index in range(count)]

    def _insert(
        self,
        tx: SqlTransaction,
        tenant: str,
        requests: Sequence[JobRequest],
        rows: Sequence[Sequence[SqlValue]],
    ) -> list[Job]:
        jobs, n_new, n_bytes = [], 0, 0
        for request, row in zip(requests, rows, strict=True):
            sql = f"INSERT INTO jobs VALUES ({_PLACES}) ON CONFLICT DO NOTHING RETURNING {JOB_COLUMNS}"
            inserted = tx.execute(sql, row)
            if inserted:
                tx.execute("INSERT INTO job_requests VALUES (?, ?)", (row[0], request.body))
                n_new, n_bytes = n_new + 1, n_bytes + _stored_bytes(request)
            jobs.append(job_of(inserted[0]) if inserted else _known_job(tx, tenant, str(row[0]), request))
        if n_new:
            self._count(tx, tenant, n_new, n_bytes)
        return jobs

    def _count(self, tx: SqlTransaction, tenant: str, n_new: int, n_bytes: int) -> None:
        [(waiting, stored_bytes)] = tx.execute(
            "INSERT INTO job_tenants (tenant, live, stored_bytes) VALUES (?, ?, ?)"
            " ON CONFLICT (tenant) DO UPDATE SET live = job_tenants.live + excluded.live,"
            " stored_bytes = job_tenants.stored_bytes + excluded.stored_bytes"
            " RETURNING live + notices, stored_bytes",
            (tenant, n_new, n_bytes),
        )
        if waiting > self._limits.max_live:
            most = self._limits.max_live
            raise Overloaded(f"more than {most} jobs and webhooks would wait", retry_after_ms=30_000)
        if stored_bytes > self._limits.max_stored_bytes:
            limit_mib = self._limits.max_stored_bytes >> 20
            raise Overloaded(f"jobs would hold more than {limit_mib} MiB", retry_after_ms=30_000)

    async def get(self, tenant: str, job_id: str) -> Job:
        """One job. Raises NotFound, and InvalidArgument without an id."""
        if not job_id:
            raise InvalidArgument("id", "must be given")
        sql = f"SELECT {JOB_COLUMNS} FROM jobs WHERE id = ? AND tenant = ?"
        return job_of(await self._row(tenant, job_id, sql))

    async def request(self, tenant: str, job_id: str) -> bytes:
        """The body of a job. Raises NotFound."""
        sql = "SELECT body FROM jobs JOIN job_requests USING (id) WHERE id = ? AND tenant = ?"
        return bytes((await self._row(tenant, job_id, sql))[0])

    async def result(self, tenant: str, job_id: str) -> JobResult | None:
        """The answer; None before the end and for a job without one. Raises NotFound."""
        sql = "SELECT status, body FROM jobs LEFT JOIN job_results USING (id) WHERE id = ? AND tenant = ?"
        status, body = await self._row(tenant, job_id, sql)
        return None if body is None else JobResult(status, bytes(body))

    async def result_part(self, tenant: str, job_id: str, *, offset: int, limit: int) -> JobResultPart | None:
        """At most `limit` bytes of the answer's body, from `offset` on; None as for `result`.

        Raises NotFound. No more of the body leaves the database.
        """
        sql = (
            "SELECT length(body), substr(body, CAST(? AS INTEGER), CAST(? AS INTEGER))"
            " FROM jobs LEFT JOIN job_results USING (id) WHERE id = ? AND tenant = ?"
        )
        n_bytes, data = await self._row(tenant, job_id, sql, offset + 1, limit)
        return None if data is None else JobResultPart(n_bytes, bytes(data))

    async def _row(self, tenant: str, job_id: str, sql: str, *values: SqlValue) -> tuple[Any, ...]:
        """The row of one job: the last two parameters of `sql` are its id and tenant. Raises NotFound."""
        rows = await self._database.read(lambda tx: tx.execute(sql, (*values, job_id, tenant)), tenant=tenant)
        if not rows:
            raise unknown_job(job_id)
        return rows[0]

    async def list_jobs(
        self,
        tenant: str,
        *,
        group_id: str = "",
        state: JobState | None = None,
        after: str = "",
        limit: int = service_bounds.JOBS_PAGE,
    ) -> list[Job]:
        """Jobs in the order of their submission, from the one after the id `after` on."""
        where, values = _filter(tenant, group_id, state)
        sql = f"SELECT {JOB_COLUMNS} FROM jobs WHERE {where} AND id > ? ORDER BY id LIMIT ?"

        def read(tx: SqlTransaction) -> list[Job]:
            return [job_of(row) for row in tx.execute(sql, (*values, after, limit))]

        return await self._database.read(read, tenant=tenant)

    async def results(
        self, tenant: str, group_id: str, *, after: str = "", limit: int = service_bounds.JOBS_PAGE
    ) -> list[tuple[Job, JobResult | None]]:
        """The jobs of a group with their answers, a page at a time: fewer jobs where answers are long."""
        where, values = _filter(tenant, group_id, None)
        sql = (
            f"SELECT {JOB_COLUMNS}, length(body) FROM jobs LEFT JOIN job_results USING (id)"
            f" WHERE {where} AND id > ? ORDER BY id LIMIT ?"
        )

        def read(tx: SqlTransaction) -> tuple[list[Job], dict[str, bytes]]:
            while rows := tx.execute(sql, (*values, after, limit)):
                rows = rows[: _fitting([row[-1] or 0 for row in rows])]
                ids = [row[0] for row in rows if row[-1] is not None]
                sql_bodies = f"SELECT id, body FROM job_results WHERE id IN ({marks(ids)})"
                bodies = dict(tx.execute(sql_bodies, ids)) if ids else {}
                # PostgreSQL may delete a job between the statements. A reader ends at a page without jobs.
                jobs = [job_of(row[:-1]) for row in rows if row[-1] is None or row[0] in bodies]
                if jobs:
                    return jobs, bodies
            return [], {}

        jobs, bodies = await self._database.read(read, tenant=tenant)
        return [
            (job, JobResult(job.status, bytes(bodies[job.id])) if job.id in bodies else None) for job in jobs
        ]

    async def counts(self, tenant: str, group_id: str = "") -> JobCounts:
        """How many jobs of the tenant, or of one group, are in each state."""
        where, values = _filter(tenant, group_id, None)
        sql = f"SELECT state, COUNT(*) FROM jobs WHERE {where} GROUP BY state"
        rows = await self._database.read(lambda tx: tx.execute(sql, values), tenant=tenant)
        return counts_of(rows)

    async def cancel(self, tenant: str, job_id: str) -> Job:
        """End a job at once; whatever still runs of it is not seen. An ended job stays as it is."""
        now_s = self._now_s()
        await self.get(tenant, job_id)
        end = partial(end_job, job_id=job_id, state=JobState.CANCELLED, now_s=now_s)
        is_ended = await self._database.run(end, is_idempotent=True, tenant=tenant)
        count_ended(self._counters, JobState.CANCELLED, int(is_ended))
        return await self.get(tenant, job_id)

    async def delete(self, tenant: str, job_id: str) -> bool:
        """Drop a job that has ended, with its result. False where there is none."""

        def delete(tx: SqlTransaction) -> bool:
            sql = "DELETE FROM jobs WHERE id = ? AND tenant = ? AND ended_unix_s > 0 RETURNING stored_bytes"
            rows = tx.execute(sql, (job_id, tenant))
            for table in ("job_results", "job_requests") if rows else ():
                tx.execute(f"DELETE FROM {table} WHERE id = ?", (job_id,))
            for (n_bytes,) in rows:
                sql = "UPDATE job_tenants SET stored_bytes = stored_bytes - ? WHERE tenant = ?"
                tx.execute(sql, (n_bytes, tenant))
            return bool(rows)

        return await self._database.run(delete, tenant=tenant)

    async def cancel_group(self, tenant: str, group_id: str) -> int:
        """End all jobs of a group; how many that were."""
        where, values = _filter(tenant, group_id, None)
        sql = f"SELECT id FROM jobs WHERE {where} AND state IN ('queued', 'running') LIMIT ?"
        now_s, n_ended = self._now_s(), 0

        def cancel_some(tx: SqlTransaction) -> tuple[int, int]:
            rows = tx.execute(sql, (*values, _CANCELLED_AT_ONCE))
            return len(rows), sum(end_job(tx, row[0], JobState.CANCELLED, now_s=now_s) for row in rows)

        while True:
            n_found, n_cancelled = await self._database.run(cancel_some, is_idempotent=True, tenant=tenant)
            n_ended += n_cancelled
            count_ended(self._counters, JobState.CANCELLED, n_cancelled)
            if n_found < _CANCELLED_AT_ONCE:
                return n_ended

    def follow(self, tenant: str, job_id: str) -> AsyncIterator[Job]:
        """The job now and after each change, until it has ended. Raises NotFound."""
        return _follow(lambda: self.get(tenant, job_id), lambda job: not job.state.ended)

    def follow_group(self, tenant: str, group_id: str) -> AsyncIterator[JobCounts]:
        """The counts of a group now and after each change, until all its jobs have ended."""
        return _follow(lambda: self._read_counts(tenant, group_id), lambda counts: counts.live > 0)

    async def _read_counts(self, tenant: str, group_id: str) -> JobCounts:
        """The counts of a group for a follower, in turn: of a large group they would read without a pause."""
        async with self._looks.slot(tenant):
            clock = asyncio.get_running_loop().time
            began_s = clock()
            counts = await self.counts(tenant, group_id)
            await asyncio.sleep(min(_NEXT_LOOK_S[1], _LOOK_REST * (clock() - began_s)))
        return counts


def check_requests(requests: Sequence[JobRequest]) -> None:
    """Raises InvalidArgument for what no tenant may submit."""
    job_bounds.SUBMITTED.check(len(requests))
    for index, request in enumerate(requests):
        field = f"jobs[{index}]"
        bounds.BODY.check(len(request.body), f"{field}.body")
        job_bounds.REFERENCE.check(len(request.reference), f"{field}.reference")
        job_bounds.GROUP.check(len(request.group_id), f"{field}.group_id")
        job_bounds.KEY.check(len(request.idempotency_key), f"{field}.idempotency_key")
        job_bounds.EXPIRES_MS.check(request.expires_ms, f"{field}.expires_ms")
        job_bounds.RETENTION_MS.check(request.retention_ms, f"{field}.retention_ms")


def _new_rows(
    ids: Sequence[str], tenant: str, requests: Sequence[JobRequest], now_s: float, key_sha256: str
) -> list[tuple[SqlValue, ...]]:
    rows = [_new_row(job_id, tenant, each, now_s) for job_id, each in zip(ids, requests, strict=True)]
    return [(*row, key_sha256, 0) for row in rows]


def _new_row(job_id: str, tenant: str, request: JobRequest, now_s: float) -> tuple[SqlValue, ...]:
    """The columns of the schema's first step, in its order."""
    hook = request.webhook
    return (
        *(job_id, tenant, request.group_id, request.reference, request.idempotency_key or None),
        *(request.digest, prefix_key(request.path, request.body), request.path),
        *(JobState.QUEUED.value, "", 0, 0, 0, "", 0, _stored_bytes(request)),
        *(now_s, 0.0, 0.0, now_s, now_s + request.expires_ms / 1e3, request.retention_ms / 1e3),
        *((hook.url, hook.secret) if hook is not None else (None, None)),
    )


def _stored_bytes(request: JobRequest) -> int:
    """The bytes of a job in its tenant's share. A short body has a row and entries in indexes beside it."""
    hook = request.webhook
    texts = (request.reference, request.group_id, request.idempotency_key, hook.url if hook else "")
    return _ROW_BYTES + len(request.body) + sum(4 * len(text) for text in texts)


def _known_job(tx: SqlTransaction, tenant: str, job_id: str, request: JobRequest) -> Job:
    """The job that was submitted before with this id or this idempotency key."""
    rows = tx.execute(
        f"SELECT {JOB_COLUMNS}, request_digest FROM jobs"
        " WHERE tenant = ? AND (id = ? OR idempotency_key = ?)",
        (tenant, job_id, request.idempotency_key or None),
    )
    if not rows or rows[0][-1] != request.digest:
        raise FailedPrecondition("the idempotency key belongs to a job with another body")
    return job_of(rows[0][:-1])


def _fitting(lengths: Sequence[int]) -> int:
    """How many answers of these lengths are read together: one, or more of a megabyte in all."""
    total = itertools.accumulate(lengths)
    return max(1, sum(n_bytes <= _RESULTS_BYTES for n_bytes in total))


def _filter(tenant: str, group_id: str, state: JobState | None) -> tuple[str, tuple[SqlValue, ...]]:
    where = "tenant = ?"
    values: tuple[SqlValue, ...] = (tenant,)
    if group_id:
        where, values = f"{where} AND group_id = ?", (*values, group_id)
    if state is not None:
        where, values = f"{where} AND state = ?", (*values, state.value)
    return where, values


async def _follow(look: Callable[[], Awaitable[T]], goes_on: Callable[[T], bool]) -> AsyncIterator[T]:
    """What `look` finds now and after each change, to the first that does not go on."""
    pause_s, seen = _NEXT_LOOK_S[0], None
    while seen is None or goes_on(seen):
        found = await look()
        if found != seen:
            yield found
            seen, pause_s = found, _NEXT_LOOK_S[0]
        if goes_on(found):
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _NEXT_LOOK_S[1])

"""Calls of routers about jobs: claim, end, give back. Each is one transaction.

A claim raises the job's attempt. `_MINE` fences `finish`, `fail` and `release`: they change only a row that
runs with the owner and the attempt of the claim.

A router is an owner with a heartbeat that it raises. Other routers watch it by their own monotonic clocks: an
owner whose heartbeat stands still has its row removed and its jobs queued again. A router without its row
ends no job, so a result that comes late is dropped, and no wall clock decides who owns a job.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from libs.common.job_bounds import RESERVED_GROUPS
from libs.database.database import Database
from libs.database.transaction import SqlTransaction
from services.router.jobs.decisions import MOST_OVERDUE, NextState, after_loss, in_claim_order, share_claims
from services.router.jobs.rows import end_job, marks
from services.router.jobs.schema import JOB_SCHEMA
from services.router.jobs.types import ClaimedJob, JobOutcome, JobProgress, JobState
from slipstream.errors import FailedPrecondition

# Changed in one transaction, so that none holds the file for long.
_SWEPT_AT_ONCE = 200
_MINE = "owner = ? AND attempt = ? AND state = 'running'"
# Since when the first queued job of each tenant waits: a look into the index a tenant. NULL: it has none.
_QUEUED_TENANTS = """SELECT tenant,
  (SELECT MIN(not_before_unix_s) FROM jobs WHERE state = 'queued' AND jobs.tenant = job_tenants.tenant)
FROM job_tenants WHERE live > 0"""
LOST_ERROR = "each router that ran the job was lost"
LATE_ERROR = "not done in time"
JobKey = tuple[str, int]  # id and attempt


class OwnerLost(FailedPrecondition):
    """This owner's row is gone: it was silent for so long that others took its jobs."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """The queue of all routers, and what an owner still has of it."""

    heartbeats: Mapping[str, int]  # of all owners
    mine: frozenset[JobKey]  # the jobs that this owner still has
    queued: int
    running: int
    oldest_unix_s: tuple[float, ...] = ()  # when the oldest jobs that can be claimed were submitted


class JobLeases:
    """The jobs of all tenants, for routers that run them."""

    def __init__(self, database: Database, *, wall_clock_s: Callable[[], float]) -> None:
        database.declare(JOB_SCHEMA)
        self._database = database
        self._now_s = wall_clock_s

    async def register(self, owner: str) -> None:
        """Make an owner. Its name is new for each process and after each loss."""
        sql = "INSERT INTO job_owners VALUES (?, 0) ON CONFLICT (owner) DO NOTHING"
        await self._database.run(lambda tx: tx.execute(sql, (owner,)), is_idempotent=True)

    async def resign(self, owner: str) -> None:
        """Remove an owner; its jobs are queued again, without a mark of failure."""

        def remove(tx: SqlTransaction) -> None:
            tx.execute("DELETE FROM job_owners WHERE owner = ?", (owner,))
            tx.execute(
                "UPDATE jobs SET state = 'queued', owner = '' WHERE owner = ? AND state = 'running'", (owner,)
            )

        await self._database.run(remove, is_idempotent=True)

    async def claim(self, owner: str, n: int) -> list[ClaimedJob]:
        """Up to `n` jobs: fair between tenants, the oldest first, those with its prefix beside it.

        Raises OwnerLost.
        """
        now_s = self._now_s()

        def claim(tx: SqlTransaction) -> list[ClaimedJob]:
            _raise_heartbeat(tx, owner)
            since = tx.execute(_QUEUED_TENANTS)
            waiting = {tenant: at_s for tenant, at_s in since if at_s is not None and at_s <= now_s}
            shares = share_claims(waiting, _running_by_tenant(tx) if len(waiting) > 1 else {}, n)
            return [job for tenant, m in shares.items() for job in _claim_of(tx, owner, tenant, m, now_s)]

        return await self._database.run(claim)

    async def has_queued(self) -> bool:
        """Whether a claim would find a job. It writes nothing, so that idle routers cost no sync."""
        sql = "SELECT 1 FROM jobs WHERE state = 'queued' AND not_before_unix_s <= ? LIMIT 1"
        now_s = self._now_s()
        return bool(await self._database.read(lambda tx: tx.execute(sql, (now_s,))))

    async def finish(self, owner: str, job: ClaimedJob, outcome: JobOutcome, state: JobState) -> bool:
        """Make the outcome the job's one result. False where the job is not this attempt's any more."""
        now_s = self._now_s()

        def finish(tx: SqlTransaction) -> bool:
            ended = end_job(
                tx,
                job.id,
                state,
                now_s=now_s,
                where=_MINE,
                values=(owner, job.attempt),
                status=outcome.status,
                body=outcome.body,
                output_tokens=outcome.output_tokens,
            )
            if ended and outcome.stored_with_end is not None:
                outcome.stored_with_end(tx)
            return ended or _has_ended(tx, job, state)

        return await self._database.run(finish, is_idempotent=True)

    async def fail(self, owner: str, job: ClaimedJob, reason: str) -> bool:
        """End a job whose result cannot be stored. False where it is not this attempt's."""
        error = f"its result cannot be stored: {reason}"
        return await self._end(owner, job, JobState.FAILED, status=500, error=error)

    async def expire(self, owner: str, job: ClaimedJob) -> bool:
        """End a job that ran until it expired. False where it is not this attempt's."""
        return await self._end(owner, job, JobState.EXPIRED, status=0, error=f"{LATE_ERROR}: it ran")

    async def _end(self, owner: str, job: ClaimedJob, state: JobState, *, status: int, error: str) -> bool:
        """End a job without a result."""
        now_s, mine = self._now_s(), (owner, job.attempt)

        def end(tx: SqlTransaction) -> bool:
            ended = end_job(
                tx, job.id, state, now_s=now_s, where=_MINE, values=mine, status=status, error=error
            )
            sql = "SELECT id FROM jobs WHERE id = ? AND attempt = ? AND state = ? AND error = ?"
            return ended or bool(tx.execute(sql, (job.id, job.attempt, state.value, error)))

        return await self._database.run(end, is_idempotent=True)

    async def release(self, owner: str, job_id: str, attempt: int, then: NextState) -> bool:
        """Queue a job again after an attempt without a result. False where it is not this attempt's.

        Without a pause it keeps its place before younger jobs.
        """
        not_before_s = self._now_s() + then.delay_s if then.delay_s else 0.0
        sql = (
            "UPDATE jobs SET state = 'queued', owner = '', failures = failures + ?, error = ?,"
            " not_before_unix_s = CASE WHEN ? > not_before_unix_s THEN ? ELSE not_before_unix_s END"
            f" WHERE id = ? AND {_MINE} RETURNING id"
        )
        values = (int(then.is_failure), then.error, not_before_s, not_before_s, job_id, owner, attempt)
        return bool(await self._database.run(lambda tx: tx.execute(sql, values), is_idempotent=True))

    async def raise_heartbeat(
        self, owner: str, progress: Mapping[JobKey, JobProgress] | None = None
    ) -> QueueState:
        """Raise the heartbeat and store the progress of jobs. Raises OwnerLost."""
        now_s = self._now_s()

        def raise_it(tx: SqlTransaction) -> QueueState:
            _raise_heartbeat(tx, owner)
            for (job_id, attempt), each in (progress or {}).items():
                values = (each.output_tokens, int(each.is_held))
                sql = (
                    f"UPDATE jobs SET output_tokens = ?, is_held = ? WHERE id = ? AND {_MINE}"
                    " AND (output_tokens <> ? OR is_held <> ?)"
                )
                tx.execute(sql, (*values, job_id, owner, attempt, *values))
            mine = tx.execute("SELECT id, attempt FROM jobs WHERE owner = ? AND state = 'running'", (owner,))
            heartbeats = tx.execute("SELECT owner, beat FROM job_owners")
            keys = frozenset((row[0], row[1]) for row in mine)
            return QueueState(dict(heartbeats), keys, *_queue(tx, now_s))

        return await self._database.run(raise_it)

    async def read_queue(self) -> QueueState:
        """The queue, for a router that is no owner."""
        now_s = self._now_s()
        return await self._database.read(lambda tx: QueueState({}, frozenset(), *_queue(tx, now_s)))

    async def remove_owner(self, owner: str, heartbeat: int) -> int:
        """Remove an owner whose heartbeat is still this one, and queue its jobs again; how many lost it."""
        now_s = self._now_s()

        def remove_owner(tx: SqlTransaction) -> int:
            sql = "DELETE FROM job_owners WHERE owner = ? AND beat = ? RETURNING owner"
            if not tx.execute(sql, (owner, heartbeat)):
                return 0
            rows = tx.execute("SELECT id, failures FROM jobs WHERE owner = ? AND state = 'running'", (owner,))
            return sum(_requeue_lost(tx, job_id, failures, now_s) for job_id, failures in rows)

        return await self._database.run(remove_owner)

    async def sweep(self) -> tuple[int, int]:
        """Expire jobs, queue those without an owner, drop old ones; how many expired and were dropped."""
        now_s = self._now_s()

        def sweep(tx: SqlTransaction) -> tuple[int, int]:
            ownerless = tx.execute(
                "SELECT id, failures FROM jobs WHERE state = 'running'"
                " AND owner NOT IN (SELECT owner FROM job_owners) LIMIT ?",
                (_SWEPT_AT_ONCE,),
            )
            for job_id, failures in ownerless:
                _requeue_lost(tx, job_id, failures, now_s)
            late = tx.execute(
                "SELECT id, error FROM jobs WHERE state IN ('queued', 'running') AND expires_unix_s <= ?"
                " LIMIT ?",
                (now_s, _SWEPT_AT_ONCE),
            )
            expired = 0
            for job_id, reason in late:
                error = f"{LATE_ERROR}: {reason}" if reason else LATE_ERROR
                expired += end_job(tx, job_id, JobState.EXPIRED, now_s=now_s, error=error)
            return expired, _drop_old(tx, now_s)

        return await self._database.run(sweep, is_idempotent=True)


def _raise_heartbeat(tx: SqlTransaction, owner: str) -> None:
    if not tx.execute("UPDATE job_owners SET beat = beat + 1 WHERE owner = ? RETURNING beat", (owner,)):
        raise OwnerLost("the jobs of this router were given to others")


def _queue(tx: SqlTransaction, now_s: float) -> tuple[int, int, tuple[float, ...]]:
    """(queued, running) of all tenants, and when the oldest jobs that can be claimed were submitted."""
    running = tx.execute("SELECT COUNT(*) FROM jobs WHERE state = 'running'")[0][0]
    live = tx.execute("SELECT COALESCE(SUM(live), 0) FROM job_tenants")[0][0]
    oldest = tx.execute(
        "SELECT created_unix_s FROM jobs WHERE state = 'queued' AND not_before_unix_s <= ?"
        " ORDER BY id LIMIT ?",
        (now_s, MOST_OVERDUE),
    )
    return max(0, int(live) - running), running, tuple(row[0] for row in oldest)


def _running_by_tenant(tx: SqlTransaction) -> dict[str, int]:
    return dict(tx.execute("SELECT tenant, COUNT(*) FROM jobs WHERE state = 'running' GROUP BY tenant"))


def _claim_of(tx: SqlTransaction, owner: str, tenant: str, n: int, now_s: float) -> list[ClaimedJob]:
    """Claim the tenant's oldest job, those that begin like it, and the oldest of the others."""
    where = "state = 'queued' AND tenant = ? AND not_before_unix_s <= ?"
    oldest = tx.execute(
        f"SELECT id, prefix_key FROM jobs WHERE {where} ORDER BY not_before_unix_s, id LIMIT ?"
        f" {tx.skip_locked}",
        (tenant, now_s, n),
    )
    if not oldest:
        return []
    # The + keeps SQLite from an index by time, which has all jobs of the tenant in another order.
    alike = tx.execute(
        "SELECT id FROM jobs WHERE state = 'queued' AND tenant = ? AND +not_before_unix_s <= ?"
        f" AND prefix_key = ? ORDER BY id LIMIT ? {tx.skip_locked}",
        (tenant, now_s, oldest[0][1], n),
    )
    order = in_claim_order(oldest, [row[0] for row in alike])[:n]
    rows = tx.execute(
        "UPDATE jobs SET state = 'running', owner = ?, attempt = attempt + 1, started_unix_s = ?,"
        " is_held = 0, error = ''"
        f" WHERE id IN ({marks(order)})"
        " RETURNING id, path, attempt, failures, created_unix_s, expires_unix_s, key_sha256, group_id",
        (owner, now_s, *order),
    )
    rows.sort(key=lambda row: order.index(row[0]))
    bodies = dict(tx.execute(f"SELECT id, body FROM job_requests WHERE id IN ({marks(order)})", order))
    return [
        ClaimedJob(
            job_id,
            tenant,
            path,
            bytes(bodies[job_id]),
            attempt,
            failures,
            made_s,
            ends_s,
            bytes.fromhex(key),
            was_checked=not group.startswith(RESERVED_GROUPS),
        )
        for job_id, path, attempt, failures, made_s, ends_s, key, group in rows
    ]


def _has_ended(tx: SqlTransaction, job: ClaimedJob, state: JobState) -> bool:
    """Whether this very attempt has ended the job: the answer to its commit was lost."""
    sql = "SELECT id FROM jobs JOIN job_results USING (id) WHERE id = ? AND attempt = ? AND state = ?"
    return bool(tx.execute(sql, (job.id, job.attempt, state.value)))


def _requeue_lost(tx: SqlTransaction, job_id: str, failures: int, now_s: float) -> int:
    then = after_loss(failures, random.random())
    if then.state is JobState.FAILED:
        end_job(tx, job_id, JobState.FAILED, now_s=now_s, status=500, error=LOST_ERROR)
    else:
        tx.execute(
            "UPDATE jobs SET state = 'queued', owner = '', failures = failures + 1, not_before_unix_s = ?"
            " WHERE id = ? AND state = 'running'",
            (now_s + then.delay_s, job_id),
        )
    return 1


def _drop_old(tx: SqlTransaction, now_s: float) -> int:
    rows = tx.execute(
        "SELECT id, tenant, stored_bytes FROM jobs WHERE ended_unix_s > 0"
        " AND (ended_unix_s + retention_s) <= ? LIMIT ?",
        (now_s, _SWEPT_AT_ONCE),
    )
    ids: Sequence[str] = [row[0] for row in rows]
    for table in ("job_results", "job_requests", "jobs") if ids else ():
        tx.execute(f"DELETE FROM {table} WHERE id IN ({marks(ids)})", ids)
    for _, tenant, n_bytes in rows:
        tx.execute(
            "UPDATE job_tenants SET stored_bytes = stored_bytes - ? WHERE tenant = ?", (n_bytes, tenant)
        )
    return len(rows)

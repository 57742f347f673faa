"""Rows of the tables of jobs as values, and the statements that several modules share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

import msgspec

from libs.common.telemetry.counters import Counters
from libs.database.transaction import SqlTransaction, SqlValue
from services.router.jobs.types import Job, JobCounts, JobState
from slipstream.bound import shown
from slipstream.errors import NotFound

JOB_COLUMNS = (
    "id, tenant, state, path, reference, group_id, attempt, status, error, output_tokens,"
    " created_unix_s, started_unix_s, ended_unix_s, expires_unix_s, is_held"
)


def job_of(row: Sequence[Any]) -> Job:
    """The job of a row of JOB_COLUMNS. In a state of a later version it runs, or failed once it has ended."""
    job_id, tenant, name, *columns, is_held = row
    job = Job(job_id, tenant, JobState(name), *columns)
    if job.state is not JobState.RUNNING:
        return job
    if job.ended_unix_s:
        return replace(job, state=JobState.FAILED)
    return replace(job, is_held=bool(is_held))


def counts_of(rows: Sequence[Sequence[Any]]) -> JobCounts:
    """The counts of rows of (state, count). Jobs in states of a later version count as running."""
    by_state = Counter[str]()
    for name, n in rows:
        by_state[JobState(name).value] += int(n)
    return JobCounts(**by_state)


def marks(values: Sequence[object]) -> str:
    """The `?` of IN (...), one for each value."""
    return ", ".join("?" * len(values))


def count_ended(counters: Counters, state: JobState, n: int = 1) -> None:
    """Count jobs that this router ended."""
    if n:
        counters.add("slipstream_jobs_ended_total", n, (state.value,))


def unknown_job(job_id: str) -> NotFound:
    """The error for an id that no job has."""
    return NotFound(f"there is no job {shown(job_id)}", field="id")


def host_of(url: str) -> str:
    """Where a webhook goes."""
    return urlsplit(url).hostname or ""


def end_job(
    tx: SqlTransaction,
    job_id: str,
    state: JobState,
    *,
    now_s: float,
    where: str = "state IN ('queued', 'running')",
    values: Sequence[SqlValue] = (),
    status: int = 0,
    error: str = "",
    body: bytes | None = None,
    output_tokens: int | None = None,
) -> bool:
    """End one job that `where` still matches, with its result and its notice. False where it does not."""
    n_bytes = 0 if body is None else len(body)
    rows = tx.execute(
        "UPDATE jobs SET state = ?, owner = '', status = ?, error = ?, ended_unix_s = ?,"
        " stored_bytes = stored_bytes + ?, output_tokens = COALESCE(?, output_tokens)"
        f" WHERE id = ? AND {where} RETURNING tenant, group_id, reference, webhook_url, webhook_secret",
        (state.value, status, error, now_s, n_bytes, output_tokens, job_id, *values),
    )
    if not rows:
        return False
    tenant, group_id, reference, url, secret = rows[0]
    if body is not None:
        tx.execute("INSERT INTO job_results VALUES (?, ?)", (job_id, body))
    tx.execute(
        "UPDATE job_tenants SET live = live - 1, notices = notices + ?, stored_bytes = stored_bytes + ?"
        " WHERE tenant = ?",
        (int(bool(url)), n_bytes, tenant),
    )
    if url:
        data = {"id": job_id, "state": state.value, "group_id": group_id, "reference": reference}
        notice = {"type": f"job.{state.value}", "timestamp": _iso_time(now_s), "data": data}
        tx.execute(
            "INSERT INTO job_notices VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING",
            (f"msg_{job_id}", url, secret, msgspec.json.encode(notice), now_s, now_s, tenant, host_of(url)),
        )
    return True


def _iso_time(unix_s: float) -> str:
    """The time as Standard Webhooks has it in bodies: ISO 8601, in UTC."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

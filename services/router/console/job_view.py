"""The jobs of all tenants as JSON of the console, and their end for a caller of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from libs.common.service_bounds import CONSOLE_JOBS_PAGE, JOBS_PAGE
from services.router.console.request_pages import short_text, whole_number
from services.router.jobs.overview import JobDetail, JobFilter, JobOverview, JobSummary
from services.router.jobs.types import Job, JobState
from slipstream.bound import shown
from slipstream.errors import InvalidArgument, NotFound, SlipstreamError
from slipstream.rpc.caller_class import CallerIdentity

log = logging.getLogger(__name__)


class JobView:
    """`jobs` is None on a router without a database."""

    def __init__(self, jobs: JobOverview | None) -> None:
        self._jobs = jobs

    async def summary_json(self) -> dict[str, Any]:
        """The queue. A database that does not answer is a state of it: `unavailable` says why."""
        if self._jobs is None:
            return {"has_database": False}
        try:
            return {"has_database": True, "unavailable": None, **summary_json(await self._jobs.summary())}
        except SlipstreamError as error:
            return {"has_database": True, "unavailable": str(error)}

    async def page_json(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of the list, newest first. Raises InvalidArgument."""
        wanted = read_filter(query)
        if self._jobs is None:
            return {"has_database": False, "jobs": [], "next_before": None}
        jobs, next_before = await self._jobs.page(wanted)
        return {"has_database": True, "jobs": [job_json(job) for job in jobs], "next_before": next_before}

    async def detail_json(self, job_id: str) -> dict[str, Any]:
        """One job. Raises NotFound."""
        return detail_json(await self._overview(job_id).get(job_id))

    async def cancel(self, job_id: str, *, caller: CallerIdentity, peer: str) -> dict[str, Any]:
        """End a job; returns it as it is then. Raises NotFound."""
        detail = await self._overview(job_id).cancel(job_id)
        log.warning("job %s is cancelled from the console by %s at %s", detail.job.id, caller, peer)
        return detail_json(detail)

    def _overview(self, job_id: str) -> JobOverview:
        if self._jobs is None:
            raise NotFound(
                f"there is no job {shown(job_id)}: this router runs without --database", field="id"
            )
        return self._jobs


def read_filter(query: Mapping[str, str]) -> JobFilter:
    """The filter in a query. Raises InvalidArgument, which names the field."""
    state = query.get("state", "")
    if state and state not in set(JobState):
        raise InvalidArgument("state", f"must be one of {', '.join(JobState)}")
    return JobFilter(
        state=JobState(state) if state else None,
        tenant=short_text(query, "tenant"),
        path=short_text(query, "path"),
        group_id=short_text(query, "group_id"),
        before=short_text(query, "before"),
        limit=whole_number(query, "limit", default=JOBS_PAGE, least=1, most=CONSOLE_JOBS_PAGE),
    )


def summary_json(summary: JobSummary) -> dict[str, Any]:
    """The queue by the names of the console."""
    return {
        "counts": msgspec.to_builtins(summary.counts),
        "ended_per_min": round(summary.ended_per_min, 1),
        "oldest_waiting_ms": None if summary.oldest_waiting_s is None else summary.oldest_waiting_s * 1e3,
        "running_tokens": summary.running_tokens,
    }


def job_json(job: Job) -> dict[str, Any]:
    """A row of the list. Times that did not come yet are null."""
    return {
        "id": job.id,
        "tenant": job.tenant,
        "state": job.state.value,
        "is_held": job.is_held,
        "path": job.path,
        "group_id": job.group_id,
        "reference": job.reference,
        "attempt": job.attempt,
        "http_status": job.status or None,
        "error": job.error or None,
        "output_tokens": job.output_tokens,
        "created_ms": job.created_unix_s * 1e3,
        "started_ms": job.started_unix_s * 1e3 or None,
        "ended_ms": job.ended_unix_s * 1e3 or None,
        "expires_ms": job.expires_unix_s * 1e3,
    }


def detail_json(detail: JobDetail) -> dict[str, Any]:
    """One job with what only operators see. Neither body nor result is part of it."""
    hook = detail.webhook
    return {
        **job_json(detail.job),
        "router": detail.router or None,
        "failures": detail.failures,
        "not_before_ms": detail.not_before_unix_s * 1e3,
        "stored_bytes": detail.stored_bytes,
        "webhook": None if hook is None else {"host": hook.host, "is_due": hook.is_due, "tries": hook.tries},
    }

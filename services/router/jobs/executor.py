"""The interface that runs the body of a job. api/jobs/executor.py implements it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from services.router.jobs.types import ClaimedJob, JobOutcome, JobProgress


class JobExecutor(Protocol):
    """Runs bodies as their endpoints would."""

    async def check(self, tenant: str, path: str, body: bytes, field: str, *, n_bytes: int) -> int:
        """Raises InvalidArgument for what can never run; `field` names the job among others.

        `n_bytes`: of all bodies that are checked together. Returns how many bytes of stored responses were
        read for it.
        """

    async def run(self, job: ClaimedJob) -> JobOutcome:
        """One attempt. A cancel stops it; another attempt waits until the workers hold nothing of it."""

    def limit(self, n: int) -> None:
        """Let the oldest `n` jobs run. The others leave their workers, keep their tokens and wait."""

    def progress(self) -> Mapping[str, JobProgress]:
        """The progress of the running jobs, by id."""

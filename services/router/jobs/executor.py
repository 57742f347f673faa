"""What runs the body of a job. The API that made the formats of bodies implements it."""

from __future__ import annotations

from typing import Protocol

from services.router.jobs.types import ClaimedJob, JobOutcome


class JobProgress:
    """How far a running job is."""

    def __init__(self) -> None:
        self.output_tokens = 0


class JobExecutor(Protocol):
    """Runs bodies as their endpoints would."""

    def check(self, path: str, body: bytes) -> None:
        """Raises InvalidArgument for what can never run."""

    async def run(self, job: ClaimedJob, progress: JobProgress) -> JobOutcome:
        """One attempt. A cancel stops it and leaves nothing on the workers."""

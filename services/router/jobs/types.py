"""The types of a job, for its tenant and to the router that runs it. Pure."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from libs.database.transaction import SqlTransaction

DEFAULT_EXPIRES_MS = 86_400_000
DEFAULT_RETENTION_MS = 7 * 86_400_000
# Jobs that have waited this long run beside live requests.
LONGEST_WAIT_S = 600.0


class DeliveryOutcome(enum.StrEnum):
    """The outcome of one delivery of a webhook."""

    DELIVERED = "delivered"
    FAILED = "failed"  # it is sent again
    GIVEN_UP = "given_up"


class JobState(enum.StrEnum):
    """Where a job is. Those that ended stay as they are. A state of a later version reads as RUNNING."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @classmethod
    def _missing_(cls, value: object) -> JobState:
        return cls.RUNNING

    @property
    def ended(self) -> bool:
        """Whether the job never changes again."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class Webhook:
    """Where the end of a job is announced. `secret` is `whsec_` and base64, as Standard Webhooks has it."""

    url: str
    secret: str


@dataclass(frozen=True, slots=True)
class JobRequest:
    """One body to run, as an endpoint of the HTTP API takes it.

    A job with the idempotency key of another job of its tenant is that job. `reference` and `group_id` are
    the submitter's; jobs of a group are listed and cancelled together.
    """

    path: str
    body: bytes
    reference: str = ""
    group_id: str = ""
    idempotency_key: str = ""
    expires_ms: int = DEFAULT_EXPIRES_MS  # until it must have ended
    retention_ms: int = DEFAULT_RETENTION_MS  # from its end until it is dropped
    webhook: Webhook | None = None

    @property
    def digest(self) -> str:
        """The digest that a repeated submission under the same idempotency key must equal."""
        return hashlib.blake2b(self.path.encode() + b"\0" + self.body, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Job:
    """A job without its bodies. Times are 0 before they are there; `status` is that of HTTP.

    One that is held runs, and waits for live requests.
    """

    id: str
    tenant: str
    state: JobState
    path: str
    reference: str
    group_id: str
    attempt: int
    status: int
    error: str
    output_tokens: int
    created_unix_s: float
    started_unix_s: float
    ended_unix_s: float
    expires_unix_s: float
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class JobResult:
    """The answer of the endpoint: its HTTP status and its JSON body."""

    status: int
    body: bytes


@dataclass(frozen=True, slots=True)
class JobResultPart:
    """Some bytes of the JSON body of a result, which has `n_bytes` in all."""

    n_bytes: int
    data: bytes


@dataclass(frozen=True, slots=True)
class JobCounts:
    """How many jobs are in each state."""

    queued: int = 0
    running: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0

    @property
    def live(self) -> int:
        """The jobs that have not ended."""
        return self.queued + self.running

    @property
    def total(self) -> int:
        """The number of all jobs."""
        return self.live + self.succeeded + self.failed + self.cancelled + self.expired


@dataclass(frozen=True, slots=True)
class ClaimedJob:
    """A job that this router runs. What it computes is a function of `id` and `body`, not of `attempt`."""

    id: str
    tenant: str
    path: str
    body: bytes
    attempt: int
    failures: int
    created_unix_s: float
    expires_unix_s: float
    key_sha256: bytes = b""  # of the API key that submitted it; empty: none
    was_checked: bool = False  # its body, by the router that took it; those of batches are not


@dataclass(frozen=True, slots=True)
class JobProgress:
    """The progress of a running job. One that is held waits for live requests, with its tokens."""

    output_tokens: int = 0
    is_held: bool = False


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """The outcome of an attempt. `is_final` is False where another attempt may give an answer.

    `is_late`: it ran until the job expired. `refusal`: why a router of another release has to run it.

    `stored_with_end` writes in the transaction that makes this outcome the job's result, and in no other.
    """

    status: int
    body: bytes
    is_final: bool = True
    is_late: bool = False
    output_tokens: int = 0
    retry_after_s: float = 0.0
    refusal: str = ""
    stored_with_end: Callable[[SqlTransaction], None] | None = None

"""Requests, decisions and limits of admission. Pure; times in milliseconds."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from libs.common import service_bounds

# The refusal of the HTTP and gRPC servers.
BUSY_MESSAGE = "Capacity temporarily exceeded, please try again."


class Priority(enum.IntEnum):
    """Classes of work, the most urgent first. JOB is that of stored jobs; no client asks for it."""

    INTERACTIVE = 0
    DEFAULT = 1
    BULK = 2
    JOB = 3


PRIORITIES: Mapping[str, Priority] = {
    priority.name.lower(): priority for priority in Priority if priority is not Priority.JOB
}


class AdmissionRequest(msgspec.Struct, frozen=True, gc=False):
    """The estimates of one request. `prefill_tokens`: the tokens that it has to compute."""

    key: str
    tenant: str
    priority: Priority = Priority.DEFAULT
    prefill_tokens: int = 0
    context_tokens: int = 0
    output_tokens: int = 0
    may_wait: bool = True
    deadline_ms: float | None = None  # the request's own

    @property
    def cost_tokens(self) -> int:
        """The charge of its tenant until the request ends."""
        return max(1, self.prefill_tokens + self.output_tokens)


def _by_class(values: Sequence[float], *, scale: float = 1.0) -> Mapping[Priority, float]:
    return {priority: scale * value for priority, value in zip(Priority, values, strict=True)}


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of the controller. The defaults are rows of libs/common/service_bounds.py."""

    max_running: int = service_bounds.MAX_RUNNING_REQUESTS
    max_waiting: Mapping[Priority, float] = field(
        default_factory=lambda: _by_class(service_bounds.MAX_WAITING_REQUESTS)
    )
    max_wait_ms: Mapping[Priority, float] = field(
        default_factory=lambda: _by_class(service_bounds.MAX_WAIT_S, scale=1e3)
    )
    promote_ms: Mapping[Priority, float] = field(
        default_factory=lambda: _by_class(service_bounds.PROMOTE_AFTER_S, scale=1e3)
    )
    max_prefill_wait_ms: float = service_bounds.MAX_PREFILL_WAIT_S * 1e3
    max_preemptions: int = service_bounds.MAX_PREEMPTIONS  # of one request
    max_victims: int = service_bounds.MAX_PREEMPTION_VICTIMS  # of one preemption
    min_retry_after_ms: float = service_bounds.RETRY_AFTER_S[0] * 1e3
    max_retry_after_ms: float = service_bounds.RETRY_AFTER_S[1] * 1e3
    tenant_weights: Mapping[str, float] = field(default_factory=dict)


class Verdict(enum.Enum):
    """The answer to an offer."""

    ADMITTED = "admitted"
    QUEUED = "queued"
    REFUSED = "refused"


class AdmissionDecision(msgspec.Struct, frozen=True, gc=False):
    """`preempted` requests return to the queue, `pushed_out` leaves it. Both are keys.

    `late_ms`: the estimate of a prefill that alone exceeds the deadline of what was tried or refused.
    """

    verdict: Verdict
    reason: str = ""
    retry_after_ms: int = 0
    preempted: tuple[str, ...] = ()
    pushed_out: str = ""
    late_ms: float = 0.0


class QueueChanges(msgspec.Struct, frozen=True, gc=False):
    """Keys that left the queue."""

    admitted: tuple[str, ...] = ()
    expired: tuple[str, ...] = ()


class WantedWorkers(msgspec.Struct, frozen=True, gc=False):
    """Queued work that waits for workers: prompt tokens, and requests without a place on a decode worker."""

    prefill_tokens: int = 0
    decode_requests: int = 0

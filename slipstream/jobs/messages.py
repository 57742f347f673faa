"""Jobs as the SDK shows them, and the messages of JobService. Pure."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.calls.durations import milliseconds
from slipstream.enum_names import EnumNames
from slipstream.errors import DataCorrupt, InvalidArgument, SlipstreamError
from slipstream.v1 import jobs_pb2

CHAT_PATH = "/v1/chat/completions"
# Of one call; the router's own bounds are above these.
_MOST_JOBS, _MOST_BYTES = 500, 4 << 20
_INDEX = re.compile(r"jobs\[(\d{1,9})\]")
_STATES = EnumNames.of(jobs_pb2.JobState)
STATES = tuple(name for name, value in _STATES.values.items() if value)
ENDED = frozenset(STATES) - {"queued", "running"}


@dataclass(frozen=True, slots=True)
class SubmittedJob:
    """A job as of one moment. `state`: queued, running, succeeded, failed, cancelled or expired.

    One that is held runs, and waits for live requests with the tokens that it has.
    """

    id: str
    state: str
    path: str
    reference: str
    group_id: str
    attempt: int
    http_status: int  # of the answer; 0 before the end
    error: str  # why it ended without an answer, or waits for a router of another release
    output_tokens: int
    created_unix_s: float
    started_unix_s: float  # 0 before
    ended_unix_s: float  # 0 before
    expires_unix_s: float
    is_held: bool = False

    @property
    def ended(self) -> bool:
        """Whether it never changes again."""
        return self.state in ENDED


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """A job and its answer: the JSON that the endpoint gives; None before the end and where there is none."""

    job: SubmittedJob
    answer: Any


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """How many jobs of a group are in each state."""

    queued: int
    running: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int

    @property
    def total(self) -> int:
        """All jobs."""
        return self.ended + self.queued + self.running

    @property
    def ended(self) -> int:
        """The states that never change again."""
        return self.succeeded + self.failed + self.cancelled + self.expired


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options of all jobs of one submission. 0 = the router's default.

    A submission that is repeated with the same `idempotency_key` finds the jobs of the first one.
    """

    path: str = CHAT_PATH
    group_id: str = ""
    idempotency_key: str = ""
    expires_s: float = 0.0
    retention_s: float = 0.0
    webhook_url: str = ""
    webhook_secret: str = ""


def with_key(options: JobOptions | None) -> JobOptions:
    """The options with an idempotency key, a random one where none is stated."""
    options = options or JobOptions()
    return options if options.idempotency_key else replace(options, idempotency_key=os.urandom(12).hex())


def submissions(
    bodies: Sequence[Mapping[str, Any]], references: Sequence[str], options: JobOptions
) -> Iterator[jobs_pb2.SubmitJobsRequest]:
    """The messages of one submission, in order, each of a bounded size. Raises InvalidArgument.

    The options have a key: each job has one, so that a call whose answer was lost is repeated without harm.
    """
    if isinstance(bodies, Mapping | str | bytes):
        raise InvalidArgument("bodies", "must be a list of bodies, also for one job: [body]")
    if references and len(references) != len(bodies):
        raise InvalidArgument("references", f"must have one for each of {len(bodies)} bodies")
    key = options.idempotency_key
    request, n_bytes = jobs_pb2.SubmitJobsRequest(), 0
    for index, body in enumerate(bodies):
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "surrogatepass")
        if request.jobs and (len(request.jobs) == _MOST_JOBS or n_bytes + len(data) > _MOST_BYTES):
            yield request
            request, n_bytes = jobs_pb2.SubmitJobsRequest(), 0
        n_bytes += len(data)
        job = request.jobs.add(
            path=options.path,
            body=data,
            reference=references[index] if references else "",
            group_id=options.group_id,
            idempotency_key=f"{key}/{index}",
            expires_ms=milliseconds("expires_s", options.expires_s),
            retention_ms=milliseconds("retention_s", options.retention_s),
        )
        if options.webhook_url:
            job.webhook.url, job.webhook.secret = options.webhook_url, options.webhook_secret
    if request.jobs:
        yield request


def amid(error: SlipstreamError, n_stored: int, n_bodies: int, key: str) -> SlipstreamError:
    """The error of a call of a submission whose earlier calls stored `n_stored` jobs.

    It names its body by the index among all, and its note says how to go on.
    """
    if isinstance(error, InvalidArgument):
        error = renumbered(error, n_stored)
    if n_stored:
        again = f"the same call with JobOptions.idempotency_key {key!r} stores the others"
        error.add_note(f"{n_stored} of {n_bodies} jobs are stored: {again}")
    return error


def renumbered(error: InvalidArgument, n_before: int) -> InvalidArgument:
    """The error by the index of its body among all of a submission; `n_before` are in earlier messages."""
    if (found := _INDEX.match(error.field)) is None:
        return error
    rest = error.field[found.end() :]
    return InvalidArgument(f"jobs[{int(found[1]) + n_before}]{rest}", error.reason)


def index_in(field: str) -> tuple[int, str, bool] | None:
    """The index of a body in the field of an error, the field, and whether it is one in the body.

    None for another field.
    """
    if (found := _INDEX.match(field)) is None:
        return None
    rest = field[found.end() :]
    return int(found[1]), rest.removeprefix(".body").removeprefix("."), rest.startswith(".body")


def submitted_job(job: jobs_pb2.Job) -> SubmittedJob:
    """The job of a message."""
    return SubmittedJob(
        state=_STATES.name(job.state),
        **{name: getattr(job, name) for name in SubmittedJob.__slots__ if name != "state"},
    )


class ResultParts:
    """The result of a job, whose JSON comes in several messages."""

    def __init__(self, first: jobs_pb2.GetJobResponse) -> None:
        self.first = first
        self._parts = [first.result]
        self.n_bytes = len(first.result)

    @property
    def missing(self) -> bool:
        """Whether further parts follow."""
        return self.n_bytes < self.first.result_bytes

    def add(self, response: jobs_pb2.GetJobResponse) -> None:
        """Add the part that follows. Raises DataCorrupt where there is none."""
        if not response.result:
            raise DataCorrupt(f"{self.first.job.id}: the result ends after {self.n_bytes} bytes")
        self._parts.append(response.result)
        self.n_bytes += len(response.result)

    @property
    def result(self) -> bytes | None:
        """The whole JSON; None for a job without a result."""
        return b"".join(self._parts) if self.first.HasField("result") else None


def finished_job(job: jobs_pb2.Job, result: bytes | None) -> FinishedJob:
    """The job of a message, and its answer from JSON."""
    return FinishedJob(submitted_job(job), None if result is None else json.loads(result))


def group_progress(counts: jobs_pb2.JobCounts) -> GroupProgress:
    """The counts of a message."""
    return GroupProgress(**{name: getattr(counts, name) for name in GroupProgress.__slots__})


def state_value(state: str) -> jobs_pb2.JobState.ValueType:
    """The state by its name; "" is any. Raises InvalidArgument."""
    if state and state not in STATES:
        raise InvalidArgument("state", f"must be one of {', '.join(STATES)}")
    return _STATES.value(state) if state else jobs_pb2.JOB_STATE_UNSPECIFIED

"""Runs the bodies of stored jobs as their endpoints would, without a connection."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from libs.common import api_bounds, job_bounds
from libs.common.http.failure import failure_of
from services.router.admission.tenant_shares import TextShares
from services.router.api.answers.answer_format import AnswerFormat, ParsedBody
from services.router.api.answers.exchange import read_exchange
from services.router.api.answers.whole import run_to_end
from services.router.api.choices import leaders_of
from services.router.execution.request_manager import REVOKED, RequestManager
from services.router.jobs.types import ClaimedJob, JobOutcome, JobProgress
from services.router.request.model_card import ModelCard
from services.router.request.types import Caller
from services.router.request.validation import check_values
from slipstream import bounds, errors
from slipstream.bound import shown

log = logging.getLogger(__name__)

# A job has so long at least, and is late where it ends by its deadline so shortly before it expires.
_LATE_S = 1.0
# Another attempt may end otherwise.
_PASSING = (errors.Overloaded, errors.Unavailable, errors.Internal, errors.DataCorrupt)


class AnswerExecutor:
    """Implements JobExecutor. `formats` are those of the endpoints by their paths."""

    def __init__(
        self,
        manager: RequestManager,
        formats: Mapping[str, AnswerFormat],
        *,
        clock: Callable[[], float],
        wall_clock_s: Callable[[], float],
        key_counts: Callable[[bytes], bool],
    ) -> None:
        """`key_counts`: whether the API key with this hash counts now."""
        self._manager = manager
        self._formats = formats
        self._clock = clock
        self._wall_clock_s = wall_clock_s
        self._key_counts = key_counts
        self._ids: set[str] = set()
        most = api_bounds.MAX_TENANT_CHECKED_BYTES
        self._checked = TextShares(most_chars=sys.maxsize, most_tenant_chars=most)

    async def check(self, tenant: str, path: str, body: bytes, field: str, *, n_bytes: int) -> int:
        """See JobExecutor. Many short bodies take as long as a long one: they leave the event loop, too."""
        if path not in self._formats:
            raise job_bounds.PATH.refused(f"{field}.path", paths=", ".join(self._formats))
        caller = Caller(tenant=tenant)
        try:
            answer_format = await self._formats[path].for_body(caller, body)
            n_further_bytes = answer_format.n_further_bytes
            read = partial(_check_body, answer_format, body, self._manager.context.card)
            with self._checked.holding(tenant, n_further_bytes):
                await self._manager.read(caller, read, n_bytes=n_bytes + n_further_bytes)
            return answer_format.n_read_bytes
        except errors.InvalidArgument as error:
            inner = "" if error.field == "body" else f".{error.field}"
            raise errors.InvalidArgument(f"{field}.body{inner}", error.reason) from None
        except errors.NotFound as error:
            if error.field is None:
                raise
            reason = error.message.removeprefix(f"{error.field}: ")
            raise errors.InvalidArgument(f"{field}.body.{error.field}", reason) from None

    async def run(self, job: ClaimedJob) -> JobOutcome:
        """See JobExecutor. Seeds come from the job's id where the body states none."""
        answer_format = self._formats.get(job.path)
        if answer_format is None:
            message = b'{"error": {"message": "no such endpoint"}}'
            return JobOutcome(404, message, is_final=False, refusal=f"no such endpoint: {shown(job.path)}")
        if not self._key_counts(job.key_sha256):  # a running one is ended by the look at all requests
            return _failed(answer_format, errors.Unauthenticated(REVOKED))
        self._ids.add(job.id)
        try:
            exchange = await read_exchange(
                self._manager, answer_format, self._caller(job), job.body, request_id=job.id
            )
            body = await run_to_end(self._manager, exchange)
            return JobOutcome(
                200,
                msgspec.json.encode(body),
                output_tokens=_output_tokens(body),
                stored_with_end=exchange.body.stored_with_end(),
            )
        except (errors.InvalidArgument, errors.NotFound) as error:
            outcome = _failed(answer_format, error)
            if not (job.was_checked and await self._is_refused(answer_format, job)):
                return outcome
            log.warning("job %s: a router of another release took its body: %s", job.id, error.message)
            return replace(outcome, is_final=False, refusal=error.message)
        except errors.SlipstreamError as error:
            left_s = job.expires_unix_s - self._wall_clock_s()
            is_late = isinstance(error, errors.DeadlineExceeded) and left_s <= _LATE_S
            return replace(_failed(answer_format, error), is_late=is_late)
        except Exception:  # it counts as a failure: else the job would run again until it expires
            log.exception("job %s: an attempt failed", job.id)
            return _failed(answer_format, errors.Internal("internal error"))
        finally:
            self._ids.discard(job.id)

    async def _is_refused(self, answer_format: AnswerFormat, job: ClaimedJob) -> bool:
        """Whether this router refuses the body itself, which another one checked when it was submitted.

        True where it cannot say now: the next attempt may.
        """
        caller = self._caller(job)
        try:
            answer_format = await answer_format.for_body(caller, job.body)
        except errors.SlipstreamError as error:  # InvalidArgument: as of an earlier response that is gone
            return not isinstance(error, errors.InvalidArgument | errors.NotFound)
        read = partial(_read_values, answer_format, job.body, self._manager.context.card)
        try:
            await self._manager.read(caller, read, n_bytes=len(job.body) + answer_format.n_further_bytes)
        except errors.SlipstreamError:
            return True
        return False

    def limit(self, n: int) -> None:
        """See JobExecutor."""
        self._manager.jobs.set_limit(n)

    def progress(self) -> Mapping[str, JobProgress]:
        """See JobExecutor. The choices of a job are held together."""
        return {
            run.request_id: JobProgress(run.sink.completion_tokens, run.hold is not None and run.hold.is_held)
            for run in self._manager.running
            if run.request_id in self._ids
        }

    def _caller(self, job: ClaimedJob) -> Caller:
        """A takeover, which waits until the workers hold nothing of an earlier attempt."""
        left_s = min(bounds.DEFAULT_DEADLINE_S, max(_LATE_S, job.expires_unix_s - self._wall_clock_s()))
        return Caller(
            tenant=job.tenant,
            deadline_s=self._clock() + left_s,
            attempt=1 + job.attempt,
            key_sha256=job.key_sha256,
            endpoint=job.path,
            submitted_unix_s=int(job.created_unix_s),
        )


def _check_body(answer_format: AnswerFormat, body: bytes, card: ModelCard) -> None:
    """Raises InvalidArgument and NotFound for values that the endpoint refuses, or that are not for a job."""
    parsed = _read_values(answer_format, body, card)
    if parsed.options.stream:
        raise job_bounds.STREAM.refused("stream")
    if parsed.is_background:
        raise job_bounds.BACKGROUND.refused("background")


def _read_values(answer_format: AnswerFormat, body: bytes, card: ModelCard) -> ParsedBody:
    """The body. Raises InvalidArgument and NotFound for values that the endpoint refuses."""
    parsed = answer_format.parse(body, "")
    requests = parsed.requests
    for index, leader in enumerate(leaders_of(requests)):
        if index == leader:  # other choices of a prompt have its values
            check_values(requests[index], card)
    return parsed


def _failed(answer_format: AnswerFormat, error: errors.SlipstreamError) -> JobOutcome:
    failure = failure_of(error)
    retry_after_s = error.retry_after_ms / 1e3 if isinstance(error, errors.Overloaded) else 0.0
    return JobOutcome(
        failure.status,
        msgspec.json.encode(answer_format.error_body(failure)),
        is_final=not isinstance(error, _PASSING),
        retry_after_s=retry_after_s,
    )


def _output_tokens(body: Mapping[str, Any]) -> int:
    usage = body.get("usage") or {}
    return int(usage.get("completion_tokens") or usage.get("output_tokens") or 0)

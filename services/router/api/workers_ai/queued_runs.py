"""Runs in the queue of jobs: one request id for each call, with one job for each run."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from libs.common import batch_bounds, job_bounds
from services.router.admission.fair_threads import RunPiece
from services.router.api.workers_ai.envelope import BAD_INPUT, JsonModeUnmet, envelope
from services.router.api.workers_ai.run_body import RunBody
from services.router.api.workers_ai.run_format import is_json_met, native_fields
from services.router.jobs.store import JobStore
from services.router.jobs.types import Job, JobRequest, JobResult
from slipstream import errors
from slipstream.metering.money import sum_of_amounts

CHAT_PATH = "/v1/chat/completions"
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PAGE = 20
_OK = 200
# What becomes of a job without an answer, by its state.
_UNFINISHED = {"cancelled": "the request was cancelled", "expired": "the request was not run in time"}
_FAILED_CODE = 5001
# The form of a run's answer, kept with its job.
_OPENAI, _OPENAI_JSON, _NATIVE, _NATIVE_JSON = "openai", "openai-json", "native", "native-json"
# The code of a failed run by the status that it would have had over HTTP.
_CODES = {400: BAD_INPUT, 413: 3006, 429: 3040, 504: 3007}


class RunUsage(msgspec.Struct, gc=False):
    """The tokens of all answers of a call, and their cost where the model has a price."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cost: float | UnsetType = UNSET
    currency: str | UnsetType = UNSET

    def add(self, other: RunUsage) -> None:
        """Add the tokens and the cost of one answer."""
        if other.cost is not UNSET:
            self.cost = sum_of_amounts(self.cost or 0.0, other.cost)
            self.currency = other.currency
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.total_tokens += other.total_tokens


class _RunMessage(msgspec.Struct, gc=False):
    content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _RunChoice(msgspec.Struct, gc=False):
    message: _RunMessage
    finish_reason: str = ""


class _Answered(msgspec.Struct, gc=False):
    choices: list[_RunChoice]
    usage: RunUsage


class _RunError(msgspec.Struct, gc=False):
    message: str = ""


class _Failed(msgspec.Struct, gc=False):
    error: _RunError


class QueuedRuns:
    """The runs that clients queued, by tenant. The model of each run is in its body."""

    def __init__(self, jobs: JobStore, *, run_piece: RunPiece) -> None:
        self._jobs = jobs
        self._run_piece = run_piece

    async def submit(
        self, tenant: str, request_id: str, runs: Sequence[RunBody], *, key_sha256: bytes = b""
    ) -> None:
        """Queue runs under a new id. Raises Overloaded when the tenant has too many."""
        group = _group_of(request_id)
        requests = [
            JobRequest(CHAT_PATH, run.chat, reference=reference_of(run), group_id=group) for run in runs
        ]
        await self._jobs.submit(tenant, requests, key_sha256=key_sha256)

    async def state(self, tenant: str, request_id: str) -> str:
        """queued, running or done. Raises NotFound."""
        counts = await self._jobs.counts(tenant, _group_of(request_id)) if _ID.fullmatch(request_id) else None
        if counts is None or not counts.total:
            raise errors.NotFound("there is no such request, or it was dropped", field="request_id")
        if not counts.live:
            return "done"
        return "queued" if counts.queued == counts.total else "running"

    async def answer(self, tenant: str, request_id: str) -> AsyncIterator[bytes]:
        """The envelope around all answers, in pieces of a few answers."""
        index, after, usage, group = 0, "", RunUsage(), _group_of(request_id)
        yield around_answers(usage)[0]
        while jobs := await self._jobs.results(tenant, group, after=after, limit=_PAGE):
            page = await self._run_piece(tenant, partial(_encode_page, jobs, index, usage))
            yield (b"," if index else b"") + page
            index += len(jobs)
            after = jobs[-1][0].id
        yield around_answers(usage)[1]


def _group_of(request_id: str) -> str:
    """The group of the runs' jobs, which no client can submit to."""
    return f"{job_bounds.RUN_GROUP}{request_id}"


def around_answers(usage: RunUsage) -> tuple[bytes, bytes]:
    """The envelope before all answers of a call, and after them."""
    head, tail = msgspec.json.encode(envelope({"responses": [], "usage": usage})).split(b"]", 1)
    return head, b"]" + tail


def _encode_page(jobs: Sequence[tuple[Job, JobResult | None]], begin: int, usage: RunUsage) -> bytes:
    """The answers of a page with commas between; `usage` grows by their tokens."""
    items = []
    for index, (job, result) in enumerate(jobs):
        items.append(msgspec.json.encode(response_item(begin + index, job, result, usage)))
    return b",".join(items)


def response_item(index: int, job: Job, result: JobResult | None, usage: RunUsage) -> dict[str, Any]:
    """One answer of a batch. `index` is the run's place in the call; `usage` grows by its tokens.

    What is long in an answer, such as log probabilities, is copied and not parsed.
    """
    kind, reference = _read_reference(job.reference)
    item: dict[str, Any] = {"id": index, "success": False, "external_reference": reference}
    if result is None:
        message = _UNFINISHED.get(job.state.value, "the request has no answer")
        return item | {"errors": [{"code": _FAILED_CODE, "message": message}]}
    try:
        return item | _outcome(kind, result, usage)
    except msgspec.DecodeError:  # of a job that its tenant submitted to this group by another API
        return item | {"errors": [{"code": _FAILED_CODE, "message": "the job has an answer of another API"}]}


def _outcome(kind: str, result: JobResult, usage: RunUsage) -> dict[str, Any]:
    if result.status != _OK:
        message = msgspec.json.decode(result.body, type=_Failed).error.message
        return {"errors": [{"code": _CODES.get(result.status, _FAILED_CODE), "message": message}]}
    answer = msgspec.json.decode(result.body, type=_Answered)
    usage.add(answer.usage)
    if kind == _OPENAI:
        return {"success": True, "result": msgspec.Raw(result.body)}
    if not answer.choices:
        raise msgspec.DecodeError("no choice")
    said, finish_reason = answer.choices[0].message, answer.choices[0].finish_reason
    is_json = kind in (_OPENAI_JSON, _NATIVE_JSON)
    if is_json and len(answer.choices) == 1 and not is_json_met(msgspec.structs.asdict(said)):
        return {"errors": [{"code": _FAILED_CODE, "message": JsonModeUnmet(finish_reason).message}]}
    if kind == _OPENAI_JSON:
        return {"success": True, "result": msgspec.Raw(result.body)}
    fields = native_fields(said.content, said.tool_calls or (), is_json=is_json)
    plain = msgspec.json.decode(result.body, type=dict[str, msgspec.Raw])
    return {"success": True, "result": {**plain, **fields}}


def reference_of(run: RunBody) -> str:
    """A run's reference, which its job keeps. Raises InvalidArgument for a reference that is too long."""
    plain, as_json = (_NATIVE, _NATIVE_JSON) if run.is_native else (_OPENAI, _OPENAI_JSON)
    kind = as_json if run.is_json else plain
    if run.reference is None:
        return kind
    batch_bounds.RUN_REFERENCE.check(len(run.reference))
    return f"{kind}={run.reference}"


def _read_reference(text: str) -> tuple[str, str | None]:
    kind, separator, reference = text.partition("=")
    return kind, reference if separator else None

"""Ended jobs of a batch -> lines of its output and error files. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from services.router.api.batches.lines import BatchLine
from services.router.api.batches.records import TokenTotals
from services.router.jobs.types import Job, JobResult, JobState

_OK = 200
_ENDS = {
    "batch_expired": "This request could not be executed before the completion window expired.",
    "request_cancelled": "This request was cancelled.",
    "batch_cancelled": "This request was not executed: the batch was cancelled.",
}


class _Details(msgspec.Struct, gc=False):
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    thinking_tokens: int = 0


class _AnswerUsage(msgspec.Struct, gc=False):
    """The usage of an answer by the names of completions, of responses, and of messages."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_input_tokens: int = 0  # messages do not count them in input_tokens
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None


class _StoredAnswer(msgspec.Struct, gc=False):
    model: str = ""
    usage: _AnswerUsage | None = None


class ResultLines(msgspec.Struct, frozen=True, gc=False):
    """Some lines of both files, and what the answers in them took."""

    output: bytes
    errors: bytes
    tokens: TokenTotals
    model: str
    n_jobs: int
    n_completed: int
    n_unfinished: int


def result_lines(jobs: Sequence[tuple[Job, JobResult | None]], *, code: str) -> ResultLines:
    """The lines of ended jobs. `code`: why a job that was cancelled was."""
    output: list[bytes] = []
    failed: list[bytes] = []
    tokens, model, n_unfinished = TokenTotals(), "", 0
    for job, result in jobs:
        if result is None:
            is_late = job.state is JobState.EXPIRED
            failed.append(_line(job.id, job.reference, None, "batch_expired" if is_late else code))
            n_unfinished += 1
            continue
        response = {"status_code": result.status, "request_id": job.id, "body": msgspec.Raw(result.body)}
        line = _line(job.id, job.reference, response)
        if result.status == _OK:
            output.append(line)
            answer = msgspec.json.decode(result.body, type=_StoredAnswer)
            tokens, model = add_tokens(tokens, _tokens(answer.usage)), model or answer.model
        else:
            failed.append(line)
    return ResultLines(
        b"".join(output), b"".join(failed), tokens, model, len(jobs), len(output), n_unfinished
    )


def unsubmitted_lines(lines: Sequence[BatchLine], *, code: str) -> bytes:
    """The lines of the error file for requests that never became jobs."""
    return b"".join([_line(f"line-{line.number}", line.custom_id, None, code) for line in lines])


def add_tokens(first: TokenTotals, second: TokenTotals) -> TokenTotals:
    """The sum of both."""
    return TokenTotals(
        first.prompt + second.prompt,
        first.cached + second.cached,
        first.completion + second.completion,
        first.reasoning + second.reasoning,
    )


def _tokens(usage: _AnswerUsage | None) -> TokenTotals:
    if usage is None:
        return TokenTotals()
    prompt = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    completion = usage.completion_tokens_details or usage.output_tokens_details or _Details()
    return TokenTotals(
        (usage.prompt_tokens or usage.input_tokens) + usage.cache_read_input_tokens,
        prompt.cached_tokens or usage.cache_read_input_tokens,
        usage.completion_tokens or usage.output_tokens,
        completion.reasoning_tokens or completion.thinking_tokens,
    )


def _line(
    request_id: str, custom_id: str, response: dict[str, object] | None, code: str | None = None
) -> bytes:
    error = None if code is None else {"code": code, "message": _ENDS[code]}
    line = {
        "id": f"batch_req_{request_id}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line) + b"\n"

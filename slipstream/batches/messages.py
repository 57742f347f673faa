"""Files, batches and their answers as the SDK shows them, from messages. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.enum_names import EnumNames, value_name
from slipstream.errors import DataCorrupt, InvalidArgument
from slipstream.replies import Usage
from slipstream.v1 import batches_pb2

_ENDED = frozenset({"completed", "failed", "expired", "cancelled"})
_PURPOSES = EnumNames.of(batches_pb2.FilePurpose, unspecified="")


@dataclass(frozen=True, slots=True)
class BatchFile:
    """A file of requests (`purpose` batch), or of a batch's answers or failures (batch_output)."""

    id: str
    name: str
    purpose: str
    n_bytes: int
    created_unix_s: float
    expires_unix_s: float


@dataclass(frozen=True, slots=True)
class BatchFault:
    """Why a batch failed before it ran: one line of its file. `line` 0 is the whole file."""

    code: str  # as "duplicate_custom_id"
    message: str
    line: int
    field: str


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How many requests of a batch have an answer, and how many failed."""

    total: int
    completed: int
    failed: int


@dataclass(frozen=True, slots=True)
class SubmittedBatch:
    """A batch as of one moment. Points in time are 0 until they come, and ids of files empty.

    `state`: validating, in_progress, finalizing, cancelling, or at the end completed, failed (a line is no
    request: nothing has run), expired or cancelled.
    """

    id: str
    state: str
    endpoint: str
    input_file_id: str
    output_file_id: str  # of the answers
    error_file_id: str  # of the failures
    errors: tuple[BatchFault, ...]
    counts: BatchProgress
    usage: Usage  # the sum over all answers
    model: str
    metadata: Mapping[str, str]
    created_unix_s: float
    expires_unix_s: float
    in_progress_unix_s: float
    finalizing_unix_s: float
    cancelling_unix_s: float
    ended_unix_s: float

    @property
    def ended(self) -> bool:
        """Whether it never changes again, and its files are whole."""
        return self.state in _ENDED


@dataclass(frozen=True, slots=True)
class BatchAnswer:
    """The answer to one line of a batch, or its failure."""

    custom_id: str
    http_status: int  # 0 for a request that did not run
    body: Any  # the JSON that the endpoint answers; None for a request that did not run
    error_code: str  # why it did not run, as "batch_expired"
    error: str


def batch_file(file: batches_pb2.File) -> BatchFile:
    """The file of a message."""
    values = {name: getattr(file, name) for name in BatchFile.__slots__}
    return BatchFile(**values | {"purpose": value_name(batches_pb2.FilePurpose, file.purpose)})


def submitted_batch(batch: batches_pb2.Batch) -> SubmittedBatch:
    """The batch of a message."""
    values: dict[str, Any] = {name: getattr(batch, name) for name in SubmittedBatch.__slots__}
    counts, usage = batch.counts, batch.usage
    values["state"] = value_name(batches_pb2.BatchState, batch.state)
    values["errors"] = tuple([_fault(error) for error in batch.errors])
    values["counts"] = BatchProgress(counts.total, counts.completed, counts.failed)
    values["usage"] = Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        cached_by_tier={},
        reasoning_tokens=usage.reasoning_tokens,
    )
    values["metadata"] = dict(batch.metadata)
    return SubmittedBatch(**values)


def _fault(error: batches_pb2.LineError) -> BatchFault:
    return BatchFault(
        value_name(batches_pb2.LineErrorCode, error.code), error.message, error.line, error.field
    )


def purpose_value(purpose: str) -> batches_pb2.FilePurpose.ValueType:
    """The purpose by its name; "" is any. Raises InvalidArgument."""
    if purpose not in _PURPOSES.values:
        raise InvalidArgument("purpose", f"must be one of {', '.join(filter(None, _PURPOSES.values))}")
    return _PURPOSES.value(purpose)


class AnswerLines:
    """Puts the lines of a file of answers together, whose pieces end anywhere."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of the line that has no end yet

    def add(self, piece: bytes) -> Iterator[BatchAnswer]:
        """The answers whose lines end in the next piece. Raises DataCorrupt."""
        first, *others = piece.split(b"\n")
        self._parts.append(first)
        for part in others:
            line, self._parts = b"".join(self._parts), [part]
            if line:
                yield _answer(line)

    def end(self) -> Iterator[BatchAnswer]:
        """The answer of a last line without a line end."""
        yield from self.add(b"\n")


def _answer(line: bytes) -> BatchAnswer:
    try:
        found = json.loads(line)
        response, error = found["response"] or {}, found["error"] or {}
        return BatchAnswer(
            custom_id=found["custom_id"],
            http_status=response.get("status_code", 0),
            body=response.get("body"),
            error_code=error.get("code") or "",
            error=error.get("message") or "",
        )
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise DataCorrupt("the file has a line that is no answer of a batch") from None

"""Files and batches as they are stored, and as OpenAI's API shows them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from libs.common import job_bounds
from services.router.api.batches.lines import LineDefect
from services.router.api.batches.states import BatchState, LineCounts
from slipstream.bound import shown
from slipstream.errors import InvalidArgument, NotFound

FILE_PREFIX, BATCH_PREFIX = "file-", job_bounds.BATCH_GROUP  # a batch's id is its jobs' group
_ID = re.compile(r"(file-|batch_)[0-9a-f]{12,40}")


def check_id(given: str, prefix: str, field: str) -> None:
    """Raise InvalidArgument for no id, and NotFound for what is none."""
    if not given:
        raise InvalidArgument(field, "must be given")
    if not is_id(given, prefix):
        raise unknown(given, field)


def unknown(given: str, field: str) -> NotFound:
    """The error for an id that names nothing of the tenant."""
    kind = "batch" if field == "batch_id" else "file"
    return NotFound(f"there is no {kind} {shown(given)}", field=field)


class StoredFile(msgspec.Struct, frozen=True, gc=False):
    """A file of a tenant, without its content."""

    id: str
    tenant: str
    name: str
    purpose: str
    n_bytes: int
    created_unix_s: float
    expires_unix_s: float


class NewBatch(msgspec.Struct, frozen=True, gc=False):
    """A client's request for a batch, checked."""

    endpoint: str
    input_file: str
    metadata: Mapping[str, str]
    output_ttl_s: int
    window: str = "24h"


class TokenTotals(msgspec.Struct, frozen=True, gc=False):
    """The tokens of all answers of a batch."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0


class RequestBatch(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A batch of a tenant. Points in time are None until they come."""

    id: str
    tenant: str
    endpoint: str
    input_file: str
    window: str
    state: BatchState
    created_unix_s: float
    expires_unix_s: float
    metadata: Mapping[str, str] = {}
    output_ttl_s: int
    key_sha256: str = ""  # of the API key that made it, in hexadecimal
    counts: LineCounts = LineCounts()
    n_submitted: int = 0  # lines that are jobs
    tokens: TokenTotals = TokenTotals()
    model: str | None = None
    defects: Sequence[LineDefect] = ()
    output_file: str | None = None
    error_file: str | None = None
    in_progress_unix_s: float | None = None
    finalizing_unix_s: float | None = None
    cancelling_unix_s: float | None = None
    ended_unix_s: float | None = None


def new_id(prefix: str, now_unix_s: float, random: bytes) -> str:
    """An id that sorts by time."""
    return f"{prefix}{int(now_unix_s * 1e3):012x}{random.hex()}"


def is_id(text: str, prefix: str) -> bool:
    """Whether a client's text may be an id of this kind."""
    return text.startswith(prefix) and _ID.fullmatch(text) is not None


def file_object(file: StoredFile) -> dict[str, Any]:
    """OpenAI's file."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.n_bytes,
        "created_at": int(file.created_unix_s),
        "expires_at": int(file.expires_unix_s),
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: RequestBatch) -> dict[str, Any]:
    """OpenAI's batch."""
    ended = {state: None for state in ("completed", "failed", "expired", "cancelled")}
    at: dict[str, float | None] = {
        **ended,
        batch.state.value: batch.ended_unix_s,
        "in_progress": batch.in_progress_unix_s,
        "finalizing": batch.finalizing_unix_s,
        "cancelling": batch.cancelling_unix_s,
    }
    names = (*ended, "in_progress", "finalizing", "cancelling")
    tokens = batch.tokens
    defects = [msgspec.to_builtins(defect) for defect in batch.defects]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": defects} if defects else None,
        "input_file_id": batch.input_file,
        "completion_window": batch.window,
        "status": batch.state.value,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": int(batch.created_unix_s),
        "expires_at": int(batch.expires_unix_s),
        **{f"{name}_at": _whole(at[name]) for name in names},
        "request_counts": {
            "total": batch.counts.total,
            "completed": batch.counts.completed,
            "failed": batch.counts.failed,
        },
        "usage": {
            "input_tokens": tokens.prompt,
            "input_tokens_details": {"cached_tokens": tokens.cached},
            "output_tokens": tokens.completion,
            "output_tokens_details": {"reasoning_tokens": tokens.reasoning},
            "total_tokens": tokens.prompt + tokens.completion,
        },
        "metadata": dict(batch.metadata) or None,
    }


def list_object(items: Sequence[Mapping[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """A page."""
    return {
        "object": "list",
        "data": items,
        "first_id": items[0]["id"] if items else None,
        "last_id": items[-1]["id"] if items else None,
        "has_more": has_more,
    }


def _whole(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s)

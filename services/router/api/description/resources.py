"""The types of answers that hold what is stored or served: files, batches, models, usage, readiness. Pure."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from services.router.api.description.answers import StrictAnswer


class Deleted(StrictAnswer):
    """What a deletion answers."""

    id: str
    object: Literal["file", "response"]
    deleted: Literal[True]


class File(StrictAnswer):
    """A file of requests, or of their answers."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: str
    status_details: None


class FilePage(StrictAnswer):
    """A page of files."""

    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchErrors(StrictAnswer):
    """Why a batch did not begin."""

    object: Literal["list"]
    data: list[dict[str, Any]]


class BatchCounts(StrictAnswer):
    """The requests of a batch."""

    total: int
    completed: int
    failed: int


class BatchReasoningTokens(StrictAnswer):
    """A part of the tokens of the answers."""

    reasoning_tokens: int


class BatchUsage(StrictAnswer):
    """The tokens of all requests that succeeded."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: BatchReasoningTokens
    total_tokens: int


class BatchResource(StrictAnswer):
    """A batch, with the times of its states."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    cancelling_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchPage(StrictAnswer):
    """A page of batches."""

    object: Literal["list"]
    data: list[BatchResource]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputItemPage(StrictAnswer):
    """A page of the input of a response."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class Pricing(StrictAnswer):
    """Exact decimal numbers a token."""

    currency: str
    prompt: str
    input_cache_read: str
    completion: str


class Model(StrictAnswer):
    """With a header `anthropic-version` models have the shape of Anthropic's API instead."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    context_length: int
    max_model_len: int
    max_context_tokens: int
    pricing: Pricing | UnsetType = UNSET


class ModelList(StrictAnswer):
    """The served model by each of its names."""

    object: Literal["list"]
    data: list[Model]


class UsageRow(StrictAnswer):
    """The first five fields are there where rows are grouped by them. `cost` is an exact decimal number."""

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost: str
    currency: str
    day: str | UnsetType = UNSET
    tenant: str | UnsetType = UNSET
    key: str | UnsetType = UNSET
    model: str | UnsetType = UNSET
    endpoint: str | UnsetType = UNSET


class UsageList(StrictAnswer):
    """Sums over requests."""

    object: Literal["list"]
    from_: str = msgspec.field(name="from")
    to: str
    group_by: list[str]
    data: list[UsageRow]


class Liveness(StrictAnswer):
    """The process answers."""

    status: Literal["alive"]


class Version(StrictAnswer):
    """The version of the router."""

    version: str

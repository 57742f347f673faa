"""Failures in the shape and with the types of Anthropic's API. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libs.common.http.failure import HttpFailure
from services.router.api.answers.field_paths import FieldPaths
from slipstream import errors

# The first class of an error that stands here counts; other failures are named by their status.
_TYPES: tuple[tuple[type[errors.SlipstreamError], str], ...] = (
    (errors.BodyTooLarge, "request_too_large"),
    (errors.Unavailable, "overloaded_error"),
    (errors.DeadlineExceeded, "timeout_error"),
)
_BY_STATUS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
# Names of fields in the chat requests that the router checks, and in a body of this API.
FIELD_NAMES: Mapping[str, str] = {
    "stop": "stop_sequences",
    "tool_call_id": "tool_use_id",
    "parameters": "input_schema",
    "tool_choice.function.name": "tool_choice.name",
}
_PATHS = FieldPaths((), FIELD_NAMES)
# Clients look for these words to know that a conversation has to become shorter.
_TOO_LONG = "prompt is too long"


def error_shape(failure: HttpFailure) -> dict[str, Any]:
    """The body of a failed request, and the data of the event that ends a stream."""
    message = _PATHS.in_failure(failure).message
    if failure.kind is not None and issubclass(failure.kind, errors.ContextExceeded):
        message = f"{_TOO_LONG}: {message}"
    return {"type": "error", "error": {"type": _type_of(failure), "message": message}}


def _type_of(failure: HttpFailure) -> str:
    for kind, name in _TYPES:
        if failure.kind is not None and issubclass(failure.kind, kind):
            return name
    other = "api_error" if failure.status >= 500 else "invalid_request_error"
    return _BY_STATUS.get(failure.status, other)

"""Failures of the Responses API: OpenAI's shape, with the paths of a response's body. Pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from libs.common.http.failure import HttpFailure
from services.router.api.answers.field_paths import FieldPaths
from slipstream import errors

# Names of fields in the chat requests that the router checks, and in a body of this API.
FIELD_NAMES: Mapping[str, str] = {
    "messages": "input",
    "tool_call_id": "call_id",
    "tool_choice.function.name": "tool_choice.name",
    "tool_choice.allowed_tools.mode": "tool_choice.mode",
    "tool_choice.allowed_tools.tools": "tool_choice.tools",
}
_PATHS = FieldPaths((), FIELD_NAMES)


class ResponseErrorCode(enum.StrEnum):
    """The codes that a failed response may have, as OpenAI names them."""

    SERVER_ERROR = "server_error"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    INVALID_PROMPT = "invalid_prompt"


def error_shape(failure: HttpFailure) -> dict[str, Any]:
    """The body of a failed request."""
    return _PATHS.in_failure(failure).openai_body()


def response_error(failure: HttpFailure) -> dict[str, Any]:
    """The error of a response that failed after its stream had begun."""
    return {"code": error_code(failure), "message": _PATHS.in_failure(failure).message}


def error_code(failure: HttpFailure) -> ResponseErrorCode:
    """The code of a response that ends with this failure."""
    kind = failure.kind or errors.Internal
    if issubclass(kind, errors.InvalidArgument):
        return ResponseErrorCode.INVALID_PROMPT
    if issubclass(kind, errors.Overloaded):
        return ResponseErrorCode.RATE_LIMIT_EXCEEDED
    return ResponseErrorCode.SERVER_ERROR

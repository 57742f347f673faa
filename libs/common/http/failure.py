"""Facts of a failed HTTP request, which each API puts in its own error shape."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from slipstream import errors

log = logging.getLogger(__name__)

# A worker or another router may be ready by then.
UNAVAILABLE_RETRY_S = 1
# The code of a refusal for lack of capacity: 3040 of the Workers AI error table.
BUSY_CODE = "3040"
# Libraries of OpenAI and Anthropic read it; else they repeat each 429 and 504.
_NO_RETRY: Mapping[str, str] = {"x-should-retry": "false"}
# OpenAI's codes of limits.
_LIMIT_CODES: Mapping[type[errors.SlipstreamError], str] = {
    errors.RateLimited: "rate_limit_exceeded",
    errors.QuotaExceeded: "insufficient_quota",
}


class HttpRefusal(Exception):
    """A refusal that only HTTP has. `message` never holds a header's value."""

    def __init__(
        self, status: int, message: str, *, code: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.headers = dict(headers or {})


@dataclasses.dataclass(frozen=True, slots=True)
class HttpFailure:
    """One failure. `field` is the bad field of the request, `code` OpenAI's code, None where there is none.

    `kind` is the type of the error where it is one of slipstream/errors.py, else None. `message` is the one
    that gRPC sends.
    """

    status: int
    message: str
    openai_type: str
    field: str | None = None
    code: str | None = None
    kind: type[errors.SlipstreamError] | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def openai_body(self) -> dict[str, Any]:
        """OpenAI's shape, and that of every route whose API has none."""
        shape = {"message": self.message, "type": self.openai_type, "param": self.field, "code": self.code}
        return {"error": shape}


ErrorShape = Callable[[HttpFailure], Mapping[str, Any]]


def failure_of(error: Exception) -> HttpFailure:
    """The failure of a request that ended with this error. An unexpected one is logged, and sent as Internal.

    Raises ConnectionResetError again: the client is gone.
    """
    if isinstance(error, web.HTTPException):
        error = HttpRefusal(error.status, error.reason, code="http_error")
    if isinstance(error, HttpRefusal):
        kind = "invalid_request_error"
        return HttpFailure(error.status, error.message, kind, code=error.code, headers=error.headers)
    error = client_error(error)
    return HttpFailure(
        error.http_status,
        error.message,
        error.openai_type,
        field=getattr(error, "field", None),
        code=_code(error),
        kind=type(error),
        headers=_headers(error),
    )


def client_error(error: Exception) -> errors.SlipstreamError:
    """The error to send to the client. An unexpected exception is logged and sent as Internal.

    Raises ConnectionResetError again: the client is gone.
    """
    if isinstance(error, errors.SlipstreamError):
        return error
    if isinstance(error, ConnectionResetError):
        raise error
    log.error("a request failed", exc_info=error)
    return errors.Internal("internal error")


def _code(error: errors.SlipstreamError) -> str | None:
    if isinstance(error, errors.NotFound) and getattr(error, "field", None) == "model":
        return "model_not_found"
    if isinstance(error, errors.ContextExceeded):
        return "context_length_exceeded"
    if isinstance(error, errors.Overloaded):
        return _LIMIT_CODES.get(type(error), BUSY_CODE)
    return "invalid_api_key" if isinstance(error, errors.Unauthenticated) else None


def _headers(error: errors.SlipstreamError) -> Mapping[str, str]:
    """Retry-After where waiting helps."""
    if isinstance(error, errors.DeadlineExceeded):
        return _NO_RETRY
    if isinstance(error, errors.Overloaded):
        if not (wait_ms := error.retry_after_ms):
            return _NO_RETRY
        return {"Retry-After": str(math.ceil(wait_ms / 1e3)), "retry-after-ms": str(wait_ms)}
    if isinstance(error, errors.Unavailable):
        return {"Retry-After": str(UNAVAILABLE_RETRY_S)}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, errors.Unauthenticated) else {}

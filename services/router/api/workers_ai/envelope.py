"""The envelope of Workers AI's answers, and its codes of errors. Pure."""

from __future__ import annotations

from typing import Any

from libs.common.http.failure import HttpFailure
from services.router.api.workers_ai.run_body import LoraUnsupported
from slipstream import errors

BAD_INPUT = 5006
_FAILED = 5001
_NO_ROUTE = 7000


class RunBodyMissing(errors.InvalidArgument):
    """The request has no body."""


class UnknownRunModel(errors.NotFound):
    """The path names a model that is not served. This API has 400 for it."""

    http_status = 400


class InvalidRunModel(errors.NotFound):
    """The path names what no model can be called."""


class JsonModeUnmet(errors.FailedPrecondition):
    """The answer to a request for JSON ended before its JSON did. The same request would end so again."""

    http_status = 422

    def __init__(self, finish_reason: str) -> None:
        is_limit = finish_reason == "length"
        end = "the answer ended at its limit of tokens" if is_limit else "a stop ended the answer"
        super().__init__(f"JSON Mode couldn't be met: {end}")


class RunTimedOut(errors.DeadlineExceeded):
    """The run's time limit passed. This API has 408 for it."""

    http_status = 408


# Of the table of Workers AI's errors, where it has a code for the case; the first type that fits goes.
_CODES: tuple[tuple[type[errors.SlipstreamError], int], ...] = (
    (RunBodyMissing, 3003),
    (LoraUnsupported, 5005),
    (errors.BodyTooLarge, 3006),
    (errors.InvalidArgument, BAD_INPUT),
    (InvalidRunModel, 3042),
    (UnknownRunModel, 5007),
    (errors.QuotaExceeded, 3036),
    (errors.Overloaded, 3040),
    (errors.DeadlineExceeded, 3007),
    (errors.Aborted, 3008),
    (errors.Unauthenticated, 10000),
    (errors.PermissionDenied, 3023),
)


def envelope(result: Any) -> dict[str, Any]:
    """The whole answer around a result."""
    return {"result": result, "success": True, "errors": [], "messages": []}


def error_envelope(failure: HttpFailure) -> dict[str, Any]:
    """The whole answer of a run that failed."""
    return {"result": None, "success": False, "errors": [error_item(failure)], "messages": []}


def error_item(failure: HttpFailure) -> dict[str, Any]:
    """One error: its code, and a message that names the field."""
    code = _code(failure)
    prefix = "AiError: Bad input: " if code == BAD_INPUT else ""
    return {"code": code, "message": f"{prefix}{failure.message}"}


def _code(failure: HttpFailure) -> int:
    for kind, code in _CODES:
        if failure.kind is not None and issubclass(failure.kind, kind):
            return code
    if failure.kind is None and failure.status in (404, 405):
        return _NO_ROUTE
    return BAD_INPUT if failure.kind is None and failure.status < 500 else _FAILED

"""Codes and statuses of Workers AI's errors."""

from __future__ import annotations

import pytest

from libs.common.http.failure import HttpRefusal, failure_of
from services.router.api.workers_ai.envelope import (
    InvalidRunModel,
    JsonModeUnmet,
    RunBodyMissing,
    RunTimedOut,
    UnknownRunModel,
    envelope,
    error_envelope,
)
from services.router.api.workers_ai.run_body import LoraUnsupported
from slipstream import errors


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (RunBodyMissing("body", "is missing"), 3003, 400),
        (errors.InvalidArgument("prompt", "must be given"), 5006, 400),
        (errors.ContextExceeded("messages", "too long"), 5006, 400),
        (LoraUnsupported("lora", "is not supported"), 5005, 405),
        (errors.BodyTooLarge("body", "too large"), 3006, 413),
        (UnknownRunModel("no such model", field="model"), 5007, 400),
        (InvalidRunModel("The model name is invalid", field="model"), 3042, 404),
        (JsonModeUnmet("length"), 5001, 422),
        (errors.NotFound("no such request", field="request_id"), 5001, 404),
        (errors.Overloaded("full"), 3040, 429),
        (errors.QuotaExceeded("spent"), 3036, 429),
        (errors.OutOfPages("full"), 3040, 429),
        (RunTimedOut("late"), 3007, 408),
        (errors.Aborted("gone"), 3008, 499),
        (errors.Unauthenticated("no key"), 10000, 401),
        (errors.PermissionDenied("not yours"), 3023, 403),
        (errors.Unavailable("no worker"), 5001, 503),
        (errors.Internal("defect"), 5001, 500),
        (errors.Quarantined("crashed workers"), 5001, 422),
        (HttpRefusal(404, "no such path", code="unknown_url"), 7000, 404),
        (HttpRefusal(415, "must be JSON", code="unsupported_content_type"), 5006, 415),
    ],
)
def test_each_error_has_its_code(error: Exception, code: int, status: int) -> None:
    failure = failure_of(error)
    answer = error_envelope(failure)
    (item,) = answer["errors"]
    assert (item["code"], failure.status) == (code, status)
    assert failure.message in item["message"]
    assert (answer["result"], answer["success"], answer["messages"]) == (None, False, [])


def test_a_result_stands_in_the_envelope() -> None:
    assert envelope({"a": 1}) == {"result": {"a": 1}, "success": True, "errors": [], "messages": []}

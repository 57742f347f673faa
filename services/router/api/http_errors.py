"""Every failure of the HTTP face in OpenAI's error shape."""

from __future__ import annotations

import logging
import math
from typing import Any

from aiohttp import web

from services.router.admission.types import BUSY_CODE
from slipstream import errors

log = logging.getLogger(__name__)


def error_object(error: errors.SlipstreamError) -> dict[str, Any]:
    """`{"error": {...}}`; the message is the one gRPC gives."""
    field = getattr(error, "field", None)
    code = "model_not_found" if isinstance(error, errors.NotFound) and field == "model" else None
    if isinstance(error, errors.Overloaded):
        code = BUSY_CODE
    return {"error": {"message": error.message, "type": error.openai_type, "param": field, "code": code}}


def error_response(error: errors.SlipstreamError) -> web.Response:
    """The status of the error tree's table, with Retry-After where waiting helps."""
    headers: dict[str, str] = {}
    if isinstance(error, errors.Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_ms / 1e3))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    if isinstance(error, errors.Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error_object(error), status=error.http_status, headers=headers)


def failure_response(request: web.BaseRequest, error: Exception) -> web.Response:
    """The answer to a request whose handler raised this before anything was sent."""
    if isinstance(error, web.HTTPException):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        shape = {"message": error.reason, "type": kind, "param": None, "code": None}
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        return web.json_response({"error": shape}, status=error.status, headers=headers)
    return error_response(told(request, error))


def told(request: web.BaseRequest, error: Exception) -> errors.SlipstreamError:
    """What a client hears of an error; what is no error of ours is logged and told without details. A
    connection that broke is raised again."""
    if isinstance(error, errors.SlipstreamError):
        return error
    if isinstance(error, ConnectionResetError):
        raise error
    log.error("%s %s failed", request.method, request.path, exc_info=error)
    return errors.Internal("internal error")

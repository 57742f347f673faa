"""Responses for failed HTTP requests, in OpenAI's error shape."""

from __future__ import annotations

import logging
import math
from typing import Any

from aiohttp import web

from services.router.admission.types import BUSY_CODE
from slipstream import errors

log = logging.getLogger(__name__)


def error_object(error: errors.SlipstreamError) -> dict[str, Any]:
    """`{"error": {...}}` with the message that gRPC sends."""
    field = getattr(error, "field", None)
    code = "model_not_found" if isinstance(error, errors.NotFound) and field == "model" else None
    if isinstance(error, errors.Overloaded):
        code = BUSY_CODE
    return {"error": {"message": error.message, "type": error.openai_type, "param": field, "code": code}}


def error_response(error: errors.SlipstreamError) -> web.Response:
    """The response with the status of the error's type, and Retry-After where waiting helps."""
    headers: dict[str, str] = {}
    if isinstance(error, errors.Overloaded):
        headers["Retry-After"] = str(math.ceil(error.retry_after_ms / 1e3))
        headers["retry-after-ms"] = str(error.retry_after_ms)
    if isinstance(error, errors.Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    return web.json_response(error_object(error), status=error.http_status, headers=headers)


def failure_response(request: web.Request, error: Exception) -> web.Response:
    """The response to a request whose handler raised before it sent anything."""
    if isinstance(error, web.HTTPException):
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        shape = {"message": error.reason, "type": kind, "param": None, "code": None}
        headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
        return web.json_response({"error": shape}, status=error.status, headers=headers)
    return error_response(client_error(request, error))


def client_error(request: web.Request, error: Exception) -> errors.SlipstreamError:
    """The error to send to the client. An unexpected exception is logged and sent as Internal.

    Raises ConnectionResetError again: the client is gone.
    """
    if isinstance(error, errors.SlipstreamError):
        return error
    if isinstance(error, ConnectionResetError):
        raise error
    log.error("%s %s failed", request.method, request.path, exc_info=error)
    return errors.Internal("internal error")

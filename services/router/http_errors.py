"""Every failure of the HTTP face in OpenAI's error shape."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from libs.common import errors
from services.router.admission_types import BUSY_CODE

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


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


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors become responses; what is no error of ours is logged and told without details."""
    try:
        return await handler(request)
    except errors.SlipstreamError as error:
        return error_response(error)
    except web.HTTPException as error:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
        shape = {"message": error.reason, "type": kind, "param": None, "code": None}
        return web.json_response({"error": shape}, status=error.status)
    except ConnectionResetError:
        raise
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return error_response(errors.Internal("internal error"))

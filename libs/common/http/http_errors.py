"""Responses for failed HTTP requests, in OpenAI's error shape or another API's."""

from __future__ import annotations

import os

from aiohttp import web

from libs.common.http.failure import ErrorShape, HttpFailure, failure_of


def new_request_id() -> str:
    """An id for a request whose client gave none."""
    return f"req-{os.urandom(12).hex()}"


def failure_response(error: Exception, shape: ErrorShape = HttpFailure.openai_body) -> web.Response:
    """The response to a request that failed before it was sent anything.

    Raises ConnectionResetError again: the client is gone.
    """
    failure = failure_of(error)
    return web.json_response(shape(failure), status=failure.status, headers=failure.headers)

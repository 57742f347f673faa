"""Attributes of a request's span by OpenTelemetry's conventions for HTTP. No header's value is among them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from aiohttp import web

from libs.common.telemetry import tracing
from slipstream import errors


@contextlib.contextmanager
def http_attributes(request: web.Request, route: str) -> Iterator[None]:
    """Describe the current span by the request; and by the status, where it fails."""
    tracing.describe(
        {
            "http.request.method": request.method,
            "http.route": route,
            "url.path": route,
            "url.scheme": request.scheme,
        }
    )
    try:
        yield
    except errors.SlipstreamError as error:
        note_status(error.http_status)
        raise
    except Exception:
        note_status(errors.Internal.http_status)
        raise


def note_status(status: int) -> None:
    """Describe the current span by the response's status."""
    tracing.describe({"http.response.status_code": status})

"""The middleware around every HTTP handler: the guard, an id, a log line, headers, errors."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Mapping

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from libs.common.http.connection import SERVER_NAME
from libs.common.http.failure import ErrorShape, HttpFailure, HttpRefusal
from libs.common.http.guard import HttpGuard, check_body
from libs.common.http.http_errors import failure_response, new_request_id
from services.router.api.access_log import AccessLog, AccessRecord
from services.router.metering.metering import Metering
from services.router.request.validation import is_request_id
from slipstream import errors
from slipstream.bound import shown

# The request's line in the access log. Handlers fill it.
RECORD = web.RequestKey("record", AccessRecord)
_ANTHROPIC_HEADER = "anthropic-version"  # of the clients of its API
_CLIENT_GONE = str(errors.Aborted.http_status)  # for the log alone
# Successful probes come every few seconds, and are left out of the access log.
_UNLOGGED = ("/healthz/ready", "/healthz/live", "/health", "/ping")
# What takes a form, which its handler checks. Every page may send one, so the Origin alone keeps pages out.
_FORM_PATHS = ("/v1/files",)


class RequestMiddleware:
    """A middleware of aiohttp, and what completes the headers of each response.

    `error_shapes` has the error shape of the routes that begin so, the first one that fits; others fail in
    OpenAI's. `anthropic_shapes` comes first for clients that send `anthropic-version`, of routes that others
    have, too. A path without a route counts as itself.
    """

    def __init__(
        self,
        guard: HttpGuard,
        access_log: AccessLog,
        *,
        is_draining: Callable[[], bool] = lambda: False,
        error_shapes: Mapping[str, ErrorShape] | None = None,
        anthropic_shapes: Mapping[str, ErrorShape] | None = None,
        metering: Metering | None = None,
    ) -> None:
        self._metering = metering
        self._guard = guard
        self._access_log = access_log
        self._is_draining = is_draining
        self._error_shapes = error_shapes or {}
        self._anthropic_shapes = anthropic_shapes or {}

    @web.middleware
    async def serve(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Guard and log a request, and respond to any failure in the error shape of its path."""
        path = await _route(request)
        with self._access_log.call("http", f"{_known_method(request)} {path}") as record:
            request[RECORD] = record
            record.request_id = _request_id(request)
            try:
                response = await self._guarded(request, handler)
            except (ConnectionResetError, asyncio.CancelledError):
                record.status = _CLIENT_GONE
                raise
            except HttpRefusal as refusal:
                record.fail(refusal, code=refusal.code)
                response = failure_response(refusal, self._error_shape(request, path))
            except Exception as error:
                record.fail(error)
                response = failure_response(error, self._error_shape(request, path))
            record.status = str(response.status)
            record.is_logged = response.status >= 400 or path not in _UNLOGGED
            return response

    def note_unexpected(self, request: web.BaseRequest) -> str:
        """Log a request that the listener refuses for its Expect header. Returns the request's id."""
        with self._access_log.call("http", f"{_known_method(request)} -") as record:
            record.request_id = _request_id(request)
            record.status, record.error = "417", "expectation_failed"
        return record.request_id

    async def complete_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the headers that every response has. aiohttp calls it before it sends them."""
        headers = response.headers
        headers["Server"] = SERVER_NAME
        record = request.get(RECORD)
        is_anthropic = _ANTHROPIC_HEADER in request.headers
        if self._metering is not None and record is not None and record.key_sha256 is not None:
            headers.update(
                self._metering.limit_headers(record.tenant, record.key_sha256, is_anthropic=is_anthropic)
            )
        if "x-request-id" not in headers:
            headers["x-request-id"] = new_request_id() if record is None else record.request_id
        if is_anthropic:  # its clients look for the id by this name
            headers["request-id"] = headers["x-request-id"]
        headers.update(self._guard.cors_headers(request.headers))
        if self._is_draining():  # the client's next request needs a connection to another router
            headers["Connection"] = "close"
            response.force_close()

    def _error_shape(self, request: web.Request, route: str) -> ErrorShape:
        path = request.path if route == "-" else route
        shapes = self._error_shapes
        if _ANTHROPIC_HEADER in request.headers:
            shapes = {**self._anthropic_shapes, **shapes}
        for prefix, shape in shapes.items():
            if path.startswith(prefix):
                return shape
        return HttpFailure.openai_body

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        self._guard.check(request.headers)
        if self._guard.is_preflight(request.method, request.headers):
            return web.Response(status=204, headers=self._guard.preflight_headers(request.headers))
        if request.match_info.http_exception is not None:
            raise _no_route(request, request.match_info.http_exception)
        takes_json = request.path not in _FORM_PATHS and not _is_bare_cancel(request)
        if request.method == hdrs.METH_POST and takes_json:
            check_body(request.headers, content_type=request.content_type)
        return await handler(request)


def _is_bare_cancel(request: web.Request) -> bool:
    """Whether the call cancels something and has no body, as OpenAI's client for JavaScript sends it."""
    return request.path.endswith("/cancel") and not request.body_exists


async def _route(request: web.Request) -> str:
    """The route of the path, whatever the method: `-` for a path that has none."""
    matched = request.match_info.route.resource
    if matched is not None:
        return matched.canonical
    for resource in request.app.router.resources():
        _, methods = await resource.resolve(request)
        if methods:
            return resource.canonical
    return "-"


def _request_id(request: web.BaseRequest) -> str:
    """The id that a client gave, if it is valid, else a new one."""
    given = request.headers.get("x-request-id", "")
    return given if is_request_id(given) else new_request_id()


def _known_method(request: web.BaseRequest) -> str:
    """The method as it may stand in a log: a word that a client made up may not."""
    return request.method if request.method in hdrs.METH_ALL else "-"


def _no_route(request: web.Request, error: web.HTTPException) -> HttpRefusal:
    """The refusal of a path that does not exist, or not for this method. It names what exists."""
    asked = f"{_known_method(request)} {shown(request.rel_url.raw_path)}"
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{asked} does not exist: this path takes {allowed}"
        return HttpRefusal(405, message, code="method_not_allowed", headers={"Allow": allowed})
    paths = [resource.canonical for resource in request.app.router.resources()]
    near = difflib.get_close_matches(request.path, paths, n=3) or ["/openapi.json, which lists all paths"]
    message = f"{asked} does not exist; there is {', '.join(near)}"
    if f"/v1{request.path}" in paths:
        message = f"{asked} does not exist, /v1{request.path} does: the base URL of the API ends with /v1"
    elif request.path.startswith("/v1/v1/"):
        message = f"{asked} does not exist: /v1 is there twice, so give this client a base URL without it"
    return HttpRefusal(404, message, code="unknown_url")

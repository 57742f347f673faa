"""The routes of the console on a router's admin port."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from libs.common.http.admin_server import caller_of
from libs.common.service_bounds import CONSOLE_SESSIONS_PAGE
from services.router.api.http.middleware import RECORD
from services.router.console.cache_view import CacheView
from services.router.console.events import EventHub
from services.router.console.fleet_view import FleetView
from services.router.console.job_view import JobView
from services.router.console.page_guard import SECURITY_HEADERS, check_post, check_site, is_console
from services.router.console.rates import RateWindow, counter_state
from services.router.console.request_pages import page_of, read_filter, short_text, whole_number
from services.router.console.static_files import INDEX, StaticFiles
from services.router.console.timeline import request_json, summaries_json
from services.router.console.worker_drains import WorkerDrains
from services.router.console.worker_statuses import WorkerStatuses
from services.router.execution.context import RouterContext
from slipstream.bound import shown
from slipstream.errors import InvalidArgument, NotFound

_SESSIONS_PAGE = 100
_MAX_CURSOR_CHARS = 4096
# What the body of a drain or a cancel may have: `{}`.
_MAX_EMPTY_BYTES = 1024


class Console:
    """Use as: start(); ... requests to `routes()` ...; await close()."""

    def __init__(
        self,
        context: RouterContext,
        fleet: FleetView,
        cache: CacheView,
        statuses: WorkerStatuses,
        drains: WorkerDrains,
        jobs: JobView,
        *,
        chat: Handler,
    ) -> None:
        """`chat` handles the body of a chat completion."""
        self._context = context
        self._recorder = context.recorder
        self._fleet = fleet
        self._cache = cache
        self._statuses = statuses
        self._drains = drains
        self._jobs = jobs
        self._chat_handler = chat
        self._files = StaticFiles()
        self._rates = RateWindow()
        self.events = EventHub(self)

    async def close(self) -> None:
        """Drop the readers, and end all calls to workers."""
        await self.events.close()
        await self._statuses.close()

    def routes(self) -> list[web.RouteDef]:
        """The routes of the admin port below /console."""
        get, post = web.get, web.post
        return [
            get("/console", self._redirect),
            get("/console/", self._index),
            get("/console/static/{path:.+}", self._static),
            get("/console/api/fleet", _reads(self._fleet_page)),
            get("/console/api/events", _reads(self._stream), allow_head=False),
            get("/console/api/requests", _reads(self._requests)),
            get("/console/api/requests/{id}", _reads(self._request)),
            get("/console/api/cache", _reads(self._cache_page)),
            get("/console/api/jobs", _reads(self._job_page)),
            get("/console/api/jobs/{id}", _reads(self._job)),
            post("/console/api/jobs/{id}/cancel", _changes(self._cancel_job)),
            post("/console/api/workers/{role}/{instance}/drain", _changes(self._drain)),
            post("/console/api/workers/{role}/{instance}/undrain", _changes(self._undrain)),
            post("/console/api/chat", _changes(self._chat)),
        ]

    async def complete_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add what every answer of the console has. aiohttp calls it before it sends the headers."""
        if not is_console(request.path):
            return
        response.headers.update(SECURITY_HEADERS)
        response.headers.setdefault("Cache-Control", "no-store")
        if (record := request.get(RECORD)) is not None:
            response.headers["x-request-id"] = record.request_id

    # ---- pages

    async def _redirect(self, request: web.Request) -> web.Response:
        # Relative, for a proxy that puts the port below a path.
        return web.Response(status=308, headers={"Location": "console/"})

    async def _index(self, request: web.Request) -> web.Response:
        return self._files.answer(INDEX, request.headers)

    async def _static(self, request: web.Request) -> web.Response:
        return self._files.answer(request.match_info["path"], request.headers)

    # ---- reading

    async def _fleet_page(self, request: web.Request) -> web.Response:
        return _json(await self.fleet())

    async def _requests(self, request: web.Request) -> web.Response:
        page = page_of(self._recorder, read_filter(request.query))
        return _json(
            {
                "requests": summaries_json(page.timelines, now_s=self._context.clock()),
                "next_before": page.next_before,
                "total": len(self._recorder),
                "dropped": self._recorder.dropped,
            }
        )

    async def _request(self, request: web.Request) -> web.Response:
        request_id, query = request.match_info["id"], request.query
        seq = whole_number(query, "seq", default=0, least=1, most=1 << 53) or None
        timeline = self._recorder.find(request_id, seq=seq)
        if timeline is None:
            raise NotFound(f"request {shown(request_id)} is not among the last {len(self._recorder)} here")
        return _json(request_json(timeline, now_s=self._context.clock()))

    async def _cache_page(self, request: web.Request) -> web.Response:
        query = request.query
        after = query.get("sessions_after", "")
        if len(after) > _MAX_CURSOR_CHARS:
            raise InvalidArgument("sessions_after", f"must have at most {_MAX_CURSOR_CHARS} characters")
        limit = whole_number(query, "limit", default=_SESSIONS_PAGE, least=1, most=CONSOLE_SESSIONS_PAGE)
        tenant = short_text(query, "tenant")
        await self._statuses.refresh()
        return _json(await self._cache.json(after=after, limit=limit, tenant=tenant))

    async def _job_page(self, request: web.Request) -> web.Response:
        return _json(await self._jobs.page_json(request.query))

    async def _job(self, request: web.Request) -> web.Response:
        return _json(await self._jobs.detail_json(request.match_info["id"]))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        async with self.events.reading(abort=partial(_abort, request)) as reader:
            await response.prepare(request)
            while data := await reader.next():
                await response.write(data)
            return response

    # ---- changing

    async def _drain(self, request: web.Request) -> web.Response:
        return await self._set_draining(request, draining=True)

    async def _undrain(self, request: web.Request) -> web.Response:
        return await self._set_draining(request, draining=False)

    async def _set_draining(self, request: web.Request, *, draining: bool) -> web.Response:
        await _check_empty(request)
        state = await self._drains.set_draining(
            request.match_info["role"],
            request.match_info["instance"],
            draining=draining,
            caller=caller_of(request),
            peer=request.remote or "",
        )
        return _json({"draining": state})

    async def _cancel_job(self, request: web.Request) -> web.Response:
        await _check_empty(request)
        job_id, caller = request.match_info["id"], caller_of(request)
        return _json(await self._jobs.cancel(job_id, caller=caller, peer=request.remote or ""))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._chat_handler(request)

    # ---- EventSource

    def begin(self) -> None:
        self._recorder.follow()

    def end(self) -> None:
        self._recorder.unfollow()
        self._rates.clear()

    async def fleet(self) -> dict[str, Any]:
        await self._statuses.refresh()
        return self._fleet.json(time_ms=_time_ms())

    def rates(self) -> dict[str, Any]:
        state = counter_state(self._context.counters, at_s=self._context.clock())
        return self._rates.rates(state, time_ms=_time_ms())

    async def jobs(self) -> dict[str, Any]:
        return await self._jobs.summary_json()

    def changed_requests(self, limit: int) -> list[dict[str, Any]]:
        return summaries_json(self._recorder.pop_changed()[-limit:], now_s=self._context.clock())


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _reads(handler: _Handler) -> _Handler:
    """A handler that answers pages of this origin only."""

    async def read(request: web.Request) -> web.StreamResponse:
        check_site(request.headers)
        return await handler(request)

    return read


def _changes(handler: _Handler) -> _Handler:
    """A handler of a POST that a page of another origin cannot send."""

    async def change(request: web.Request) -> web.StreamResponse:
        check_post(request.headers, content_type=request.content_type)
        return await handler(request)

    return change


async def _check_empty(request: web.Request) -> None:
    """Raises InvalidArgument for a body with a setting, which nothing would heed."""
    if (await request.content.read(_MAX_EMPTY_BYTES)).strip() not in (b"", b"{}"):
        raise InvalidArgument("body", "must be {}")


def _abort(request: web.Request) -> None:
    """Close the connection of a reader; what waits to be written goes nowhere."""
    if request.transport is not None:
        request.transport.abort()


def _json(page: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(page), content_type="application/json")


def _time_ms() -> float:
    return round(time.time() * 1e3, 1)

"""The console's pages with a fake router behind them: the same paths, headers and errors.

`python -m tests.support.console.console_server --port 8900` serves it until it is interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Awaitable, Callable
from types import TracebackType

from aiohttp import web

from services.router.console.page_guard import SECURITY_HEADERS
from services.router.console.static_files import INDEX, StaticFiles
from tests.support.console.fake_chat import answer_chat
from tests.support.console.fleet_source import FleetSource, Json
from tests.support.console.job_source import JobSource
from tests.support.console.request_source import detail_of

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _now_ms() -> float:
    return time.time() * 1e3


class ConsoleServer:
    """`with ConsoleServer(source) as server`: serves on `server.url` in a thread. `key` None: open."""

    def __init__(
        self, source: FleetSource, *, port: int = 0, key: str | None = None, jobs: JobSource | None = None
    ) -> None:
        self.source = source
        self.jobs = jobs or JobSource(source.now_ms)
        self.key = key
        self.posts: list[str] = []
        self._files = StaticFiles()
        self._port = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> ConsoleServer:
        self._thread.start()
        self._call(self._start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _call(self, coroutine: Awaitable[None]) -> None:
        async def run() -> None:
            await coroutine

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(30)

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/console/", self._file),
                web.get("/console/static/{path:.+}", self._file),
                web.get("/console/api/fleet", self._fleet),
                web.get("/console/api/events", self._events),
                web.get("/console/api/requests", self._requests),
                web.get("/console/api/requests/{id:[^/]+}", self._request),
                web.get("/console/api/cache", self._cache),
                web.post("/console/api/workers/{role}/{instance}/{verb}", self._drain),
                web.get("/console/api/jobs", self._job_page),
                web.get("/console/api/jobs/{id}", self._job),
                web.post("/console/api/jobs/{id}/cancel", self._cancel),
                web.post("/console/api/chat", self._chat),
            ]
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/console/"

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        is_open = self.key is None or not request.path.startswith("/console/api/")
        if not is_open and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "an operator's key is needed", "invalid_api_key")
        if request.method == "POST" and request.headers.get("x-slipstream-console") != "1":
            return _error(403, "the header x-slipstream-console is missing", "console_header")
        return await handler(request)

    async def _file(self, request: web.Request) -> web.Response:
        response = self._files.answer(request.match_info.get("path", INDEX), request.headers)
        response.headers.update(SECURITY_HEADERS)
        return response

    async def _fleet(self, request: web.Request) -> web.Response:
        return web.json_response(self._page())

    def _page(self) -> Json:
        self.source.now_ms = _now_ms()
        return self.source.fleet()

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionResetError):  # the page is closed
            await self._send_events(response)
        return response

    async def _send_events(self, response: web.StreamResponse) -> None:
        for back_s in range(240, 0, -1):  # the charts of a page that was open for some minutes
            self.source.now_ms = _now_ms() - back_s * 1e3
            await _send(response, "rates", self.source.rates())
        while True:
            await _send(response, "fleet", self._page())
            await _send(response, "rates", self.source.rates())
            await _send(response, "jobs", self.jobs.summary())
            await _send(response, "request", [self.source.start_request()])
            await asyncio.sleep(1)

    async def _requests(self, request: web.Request) -> web.Response:
        before = request.query.get("before")
        limit = min(500, int(request.query.get("limit", "100")))
        page = self.source.page_of_requests(limit=limit, before=int(before) if before else None)
        return web.json_response(page)

    async def _request(self, request: web.Request) -> web.Response:
        seq = request.query.get("seq")
        row = self.source.find(request.match_info["id"], int(seq) if seq else None)
        if row is None:
            return _error(404, "the request is not kept", "not_found")
        return web.json_response(detail_of(row))

    async def _cache(self, request: web.Request) -> web.Response:
        after, limit = request.query.get("sessions_after", ""), int(request.query.get("limit", "100"))
        return web.json_response(self.source.cache(after=after, limit=limit))

    async def _job_page(self, request: web.Request) -> web.Response:
        return web.json_response(self.jobs.page(request.query))

    async def _job(self, request: web.Request) -> web.Response:
        found = self.jobs.detail(request.match_info["id"])
        return web.json_response(found) if found else _error(404, "there is no such job", "not_found")

    async def _cancel(self, request: web.Request) -> web.Response:
        self.posts.append(f"cancel {request.match_info['id']}")
        found = self.jobs.cancel(request.match_info["id"])
        return web.json_response(found) if found else _error(404, "there is no such job", "not_found")

    async def _drain(self, request: web.Request) -> web.Response:
        instance, verb = request.match_info["instance"], request.match_info["verb"]
        self.posts.append(f"{verb} {instance}")
        (self.source.drained.add if verb == "drain" else self.source.drained.discard)(instance)
        return web.json_response({"draining": verb == "drain"})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await answer_chat(request)


async def _send(response: web.StreamResponse, event: str, data: object) -> None:
    await response.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())


def _error(status: int, message: str, code: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "error", "code": code}}, status=status)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8900)
    parser.add_argument("--key")
    options = parser.parse_args()
    with ConsoleServer(FleetSource(_now_ms()), port=options.port, key=options.key) as running:
        print(running.url)
        threading.Event().wait()

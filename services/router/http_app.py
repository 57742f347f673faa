"""The OpenAI-shaped HTTP face: the same pipeline, bounds and words as gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from libs.common import bounds, errors, tracing
from services.router.fleet import RouterFleet
from services.router.http_errors import error_middleware, error_object, error_response
from services.router.metrics import Metrics
from services.router.model_card import ModelCard
from services.router.openai_request import Envelope, Parser, parse_chat, parse_completion, parse_json
from services.router.openai_response import Answer, sse
from services.router.placement_json import DEBUG_HEADER, PLACEMENT_HEADER, header_text
from services.router.request import Caller
from services.router.runs import Run, Runs
from services.router.stall_timer import StallTimer
from services.router.tenants import Tenants
from slipstream.v1 import router_pb2

log = logging.getLogger(__name__)

Event = router_pb2.GenerateResponse


class EventStream(web.StreamResponse):
    """An answer whose headers go out together with its first event, not before."""

    _send_headers_immediately = False  # of aiohttp; were it gone, the headers would be a write of their own


class HttpFace:
    """Routes of the public API. Times are in seconds; see docs/bounds.md."""

    def __init__(
        self,
        runs: Runs,
        *,
        fleet: RouterFleet,
        card: ModelCard,
        tenants: Tenants,
        metrics: Metrics,
        body_read_s: float = bounds.BODY_READ_S,
        write_stall_s: float = bounds.WRITE_STALL_S,
    ) -> None:
        self._runs = runs
        self._fleet = fleet
        self._card = card
        self._tenants = tenants
        self._metrics = metrics
        self._body_read_s = body_read_s
        self._write_stall_s = write_stall_s

    def app(self) -> web.Application:
        """The application. Run it with `handler_cancellation`: a client that leaves ends its request."""
        app = web.Application(middlewares=[error_middleware], client_max_size=bounds.MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._generate(parse_chat, chat=True))
        app.router.add_post("/v1/completions", self._generate(parse_completion, chat=False))
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model}", self._model)
        app.router.add_get("/healthz", self._ready)
        app.router.add_get("/healthz/ready", self._ready)
        app.router.add_get("/healthz/live", self._live)
        app.router.add_get("/metrics", self._metrics_text)
        return app

    # ---- generation

    def _generate(
        self, parse: Parser, *, chat: bool
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            if not tracing.enabled():
                return await answer(request)
            name = f"{request.method} {request.path}"
            with tracing.server_span(name, request.headers, begins=True):
                return await answer(request)

        async def answer(request: web.Request) -> web.StreamResponse:
            caller = self._caller(request)
            data = await self._read_body(request)
            clock = asyncio.get_running_loop().time
            arrived_s = clock()
            generation, envelope = parse(parse_json(data), request.headers.get("x-request-id", ""))
            try:
                run = await self._runs.begin(generation, caller)
            except errors.Overloaded as error:
                tracing.failed(error)
                refusal = error_response(error)
                await refusal.prepare(request)
                await refusal.write_eof()
                self._runs.cluster.counters.observe("slipstream_refusal_ms", (clock() - arrived_s) * 1e3)
                return refusal
            try:
                return await self._answer(request, run, envelope, chat=chat)
            finally:
                run.end()

        return handle

    async def _answer(
        self, request: web.Request, run: Run, envelope: Envelope, *, chat: bool
    ) -> web.StreamResponse:
        opening, *events = await run.pipe.next_events()
        answer = Answer(
            opening.started,
            chat=chat,
            include_usage=envelope.include_usage,
            trail=request.headers.get("x-slipstream-trail") == "1",
        )
        # Whatever fails before the first token still gets a status of its own.
        events = events or await run.pipe.next_events()
        if envelope.stream:
            return await self._stream(request, run, answer, events)
        while events:
            for event in events:
                if event.HasField("finished"):
                    return web.json_response(answer.body(event.finished), headers=_headers(request, run))
                answer.add(event.delta)
            events = await run.pipe.next_events()
        raise errors.Internal("the answer has no end")

    async def _stream(
        self, request: web.Request, run: Run, answer: Answer, events: Sequence[Event]
    ) -> web.StreamResponse:
        response = EventStream(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **_headers(request, run),
            }
        )
        await response.prepare(request)
        stall = StallTimer(self._write_stall_s, lambda: self._cut_off(request))
        data = answer.opening()
        try:
            while events:
                ended = False
                for event in events:
                    if event.HasField("delta"):
                        data += answer.delta_event(event.delta)
                    else:
                        ended, data = True, data + answer.closing(event.finished)
                stall.begin()
                if ended:
                    await response.write_eof(data)
                    return response
                await response.write(data)
                stall.end()
                data, events = b"", await run.pipe.next_events()
            raise errors.Internal("the answer has no end")
        except errors.SlipstreamError as error:
            # The status is sent: clients read the error from the stream, which ends without [DONE].
            tracing.failed(error)
            stall.begin()
            await response.write_eof(sse(error_object(error)))
            return response
        finally:
            stall.close()

    def _cut_off(self, request: web.Request) -> None:
        """What waits to be written fails, and with it the request."""
        log.warning("a client read nothing for %.0f s and is cut off", self._write_stall_s)
        if request.transport is not None:
            request.transport.abort()

    async def _read_body(self, request: web.Request) -> bytes:
        if (request.content_length or 0) > bounds.MAX_BODY_BYTES:
            raise bounds.body_too_large()
        try:
            if request.content.is_eof():  # most bodies are there with the last header
                return await request.read()
            async with asyncio.timeout(self._body_read_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise bounds.body_too_large() from None
        except TimeoutError:
            raise bounds.BODY_TIME.refused() from None

    def _caller(self, request: web.Request) -> Caller:
        headers = request.headers
        timeout = headers.get("x-request-timeout-ms")
        deadline_s = None
        if timeout is not None:
            timeout_ms = int(timeout) if timeout.isdecimal() and len(timeout) < 10 else -1
            bounds.TIMEOUT.check(timeout_ms)
            deadline_s = asyncio.get_running_loop().time() + timeout_ms / 1e3
        return Caller(
            tenant=self._tenant(request),
            session=headers.get("x-session-affinity"),
            deadline_s=deadline_s,
            pinned_prefill=headers.get("x-slipstream-prefill"),
            priority=headers.get("x-slipstream-priority", ""),
            reject_if_busy=_reject_if_busy(request.query.get("rejectIfBusy")),
        )

    def _tenant(self, request: web.Request) -> str:
        return self._tenants.tenant_of(request.headers.get("Authorization"))

    # ---- the rest

    async def _models(self, request: web.Request) -> web.Response:
        self._tenant(request)
        return web.json_response({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: web.Request) -> web.Response:
        self._tenant(request)
        name = request.match_info["model"]
        if name != self._card.name:
            raise errors.NotFound(f"model: {name[:64]!r} is not served here", field="model")
        return web.json_response(self._model_object())

    def _model_object(self) -> dict[str, object]:
        return {
            "id": self._card.name,
            "object": "model",
            "created": self._card.created_unix_s,
            "owned_by": "slipstream",
            "max_context_tokens": self._card.max_context_tokens,
        }

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def _ready(self, request: web.Request) -> web.Response:
        ready = self._fleet.ready
        workers = {f"{link.worker.role}/{link.worker.instance}": link.ready for link in self._fleet.links()}
        status = "ready" if ready else "waiting for a prefill and a decode worker"
        return web.json_response({"status": status, "workers": workers}, status=200 if ready else 503)

    async def _metrics_text(self, request: web.Request) -> web.Response:
        return web.Response(text=await self._metrics.render(), content_type="text/plain")


def _headers(request: web.Request, run: Run) -> dict[str, str]:
    """Of an answer whose first token is there; `x-slipstream-debug: 1` asks why it runs where it runs."""
    headers = {"x-request-id": run.request_id}
    decision = run.decision()
    if decision is not None and request.headers.get(DEBUG_HEADER) == "1":
        headers[PLACEMENT_HEADER] = header_text(decision)
    return headers


def _reject_if_busy(given: str | None) -> bool:
    """The query parameter, for clients that send every option as one."""
    if given not in (None, "true", "false"):
        raise bounds.TYPE.refused("rejectIfBusy", expected="true or false")
    return given == "true"

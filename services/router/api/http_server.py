"""The OpenAI-shaped HTTP face: the same pipeline, bounds and words as gRPC."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion11, RawRequestMessage
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler

from libs.common import service_bounds
from libs.common.rpc import tracing
from services.router.api.api_keys import ApiKeys
from services.router.api.http_errors import client_error, error_object, error_response, failure_response
from services.router.api.metrics import Metrics
from services.router.api.openai_request import Parser, parse_chat, parse_completion
from services.router.api.openai_response import ResponseWriter, sse
from services.router.api.sse_stream import EventStream
from services.router.execution.request_manager import RequestManager
from services.router.execution.running_request import RunningRequest
from services.router.placement.decision_json import DEBUG_HEADER, PLACEMENT_HEADER, header_text
from services.router.request.model_card import ModelCard
from services.router.request.types import Caller
from services.router.workers.fleet import RouterFleet
from slipstream import bounds, errors
from slipstream.v1 import router_pb2

log = logging.getLogger(__name__)

Event = router_pb2.GenerateEvent
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_CHAT, _COMPLETION, _MODEL = "/v1/chat/completions", "/v1/completions", "/v1/models/"


class HttpServer:
    """Routes of the public API. Times are in seconds; see docs/bounds.md."""

    def __init__(
        self,
        runs: RequestManager,
        *,
        fleet: RouterFleet,
        card: ModelCard,
        tenants: ApiKeys,
        metrics: Metrics,
        body_read_s: float = bounds.BODY_READ_S,
        write_stall_s: float = service_bounds.WRITE_STALL_S,
    ) -> None:
        self._runs = runs
        self._fleet = fleet
        self._card = card
        self._tenants = tenants
        self._metrics = metrics
        self._body_read_s = body_read_s
        self._write_stall_s = write_stall_s
        self._clock = asyncio.get_running_loop().time
        self._routes: dict[tuple[str, str], Handler] = {
            ("POST", _CHAT): partial(self._generate, span=f"POST {_CHAT}", parse=parse_chat, chat=True),
            ("POST", _COMPLETION): partial(
                self._generate, span=f"POST {_COMPLETION}", parse=parse_completion, chat=False
            ),
            ("GET", "/v1/models"): self._models,
            ("GET", _MODEL): self._model,
            ("GET", "/healthz"): self._ready,
            ("GET", "/healthz/ready"): self._ready,
            ("GET", "/healthz/live"): self._live,
            ("GET", "/metrics"): self._metrics_text,
        }

    def server(self, *, keepalive_s: float = service_bounds.IDLE_CONNECTION_S) -> web.Server:
        """The server. A client that leaves ends its request; a connection may be idle for `keepalive_s`."""
        # Applications of aiohttp put four more coroutines around each handler.
        return web.Server(
            self._handle,
            request_factory=_make_request,
            handler_cancellation=True,
            keepalive_timeout=keepalive_s,
            access_log=None,
        )

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any request. Whatever fails is told in OpenAI's shape."""
        try:
            handler = self._routes.get((request.method, request.raw_path)) or self._find_handler(request)
            if "Expect" in request.headers:
                await _say_continue(request)
            return await handler(request)
        except Exception as error:
            return failure_response(request, error)

    def _find_handler(self, request: web.BaseRequest) -> Handler:
        """By the path without its query. Raises HTTPNotFound, HTTPMethodNotAllowed."""
        method = "GET" if request.method == "HEAD" else request.method
        path = _MODEL if request.path.startswith(_MODEL) else request.path
        handler = self._routes.get((method, path))
        if handler is None:
            allowed = [of for of, known in self._routes if known == path]
            allowed += ["HEAD"] if "GET" in allowed else []
            raise web.HTTPMethodNotAllowed(method, allowed) if allowed else web.HTTPNotFound()
        return handler

    # ---- generation

    async def _generate(
        self, request: web.BaseRequest, *, span: str, parse: Parser, chat: bool
    ) -> web.StreamResponse:
        with tracing.server_span(span, request.headers, begins=True):
            caller = self._caller(request)
            data = await self._read_body(request)
            arrived_s = self._clock()
            generation, envelope = parse(data, request.headers.get("x-request-id", ""))
            try:
                run = await self._runs.begin(generation, caller)
            except errors.Overloaded as error:
                tracing.failed(error)
                refusal = error_response(error)
                await refusal.prepare(request)
                await refusal.write_eof()
                self._runs.context.counters.observe(
                    "slipstream_refusal_ms", (self._clock() - arrived_s) * 1e3
                )
                return refusal
            try:
                with_stats = run.sink.wants_stats = request.headers.get("x-slipstream-trail") == "1"
                # An answer in one piece is not needed before its first token, nor known before where it runs.
                run.sink.holds_start = not envelope.stream or request.headers.get(DEBUG_HEADER) == "1"
                opening, *events = await run.sink.next_events()
                answer = ResponseWriter(
                    opening.started, chat=chat, include_usage=envelope.include_usage, with_stats=with_stats
                )
                if envelope.stream:
                    return await self._stream(request, run, answer, events)
                return await self._whole(request, run, answer, events)
            finally:
                run.end()

    async def _whole(
        self, request: web.BaseRequest, run: RunningRequest, answer: ResponseWriter, events: Sequence[Event]
    ) -> web.StreamResponse:
        while events:
            for event in events:
                if event.HasField("finished"):
                    return web.json_response(answer.body(event.finished), headers=_headers(request, run))
                answer.add(event.delta)
            events = await run.sink.next_events()
        raise errors.Internal("the answer has no end")

    async def _stream(
        self, request: web.BaseRequest, run: RunningRequest, answer: ResponseWriter, events: Sequence[Event]
    ) -> web.StreamResponse:
        stream = EventStream(request, _headers(request, run), opening=answer.opening())
        run.sink.direct_writer = _DirectWriter(stream, answer)
        ended = False
        try:
            while events := events or await run.sink.next_events():
                data = b""
                for event in events:
                    if event.HasField("delta"):
                        data += answer.delta_event(event.delta)
                    else:
                        ended, data = True, data + answer.closing(event.finished)
                if stream.send(data, last=ended):
                    await self._drain(stream)
                if ended:
                    return stream
                events = ()
            raise errors.Internal("the answer has no end")
        except Exception as error:
            if not stream.begun:
                raise  # whatever fails before the first token gets a status of its own
            await self._tell(request, stream, error)
            return stream
        finally:
            run.sink.direct_writer = None

    async def _tell(self, request: web.BaseRequest, stream: EventStream, error: Exception) -> None:
        """The status is sent: clients read the error from the stream, which ends without [DONE]."""
        failure = client_error(request, error)
        tracing.failed(failure)
        if stream.send(sse(error_object(failure)), last=True):
            await self._drain(stream)

    async def _drain(self, stream: EventStream) -> None:
        """Wait until the client has read what was written. A client that stalls is cut off."""
        stall = asyncio.get_running_loop().call_later(self._write_stall_s, self._cut_off, stream)
        try:
            await stream.drain()
        finally:
            stall.cancel()

    def _cut_off(self, stream: EventStream) -> None:
        log.warning("a client read nothing for %.0f s and is cut off", self._write_stall_s)
        stream.cut_off()

    async def _read_body(self, request: web.BaseRequest) -> bytes:
        try:
            if request.content.is_eof():  # most bodies are there with the last header
                data = request.content.read_nowait()
                if len(data) > bounds.MAX_BODY_BYTES:
                    raise bounds.body_too_large()
                return data
            if (request.content_length or 0) > bounds.MAX_BODY_BYTES:
                raise bounds.body_too_large()
            async with asyncio.timeout(self._body_read_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise bounds.body_too_large() from None
        except TimeoutError:
            raise bounds.BODY_TIME.refused() from None
        except web.RequestPayloadError as error:  # not what its Content-Encoding says
            raise bounds.BODY_FORMAT.refused() from error

    def _caller(self, request: web.BaseRequest) -> Caller:
        headers = request.headers
        timeout = headers.get("x-request-timeout-ms")
        deadline_s = None
        if timeout is not None:
            timeout_ms = int(timeout) if timeout.isdecimal() and len(timeout) < 10 else -1
            bounds.TIMEOUT.check(timeout_ms)
            deadline_s = self._clock() + timeout_ms / 1e3
        return Caller(
            tenant=self._tenants.tenant_of(headers.get("Authorization")),
            session=headers.get("x-session-affinity"),
            deadline_s=deadline_s,
            pinned_prefill=headers.get("x-slipstream-prefill"),
            priority=headers.get("x-slipstream-priority", ""),
            reject_if_busy="?" in request.raw_path and _reject_if_busy(request.query.get("rejectIfBusy")),
        )

    def _tenant(self, request: web.BaseRequest) -> str:
        return self._tenants.tenant_of(request.headers.get("Authorization"))

    # ---- the rest

    async def _models(self, request: web.BaseRequest) -> web.Response:
        self._tenant(request)
        return web.json_response({"object": "list", "data": [self._model_object()]})

    async def _model(self, request: web.BaseRequest) -> web.Response:
        self._tenant(request)
        name = request.path.removeprefix(_MODEL)
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

    async def _live(self, request: web.BaseRequest) -> web.Response:
        return web.json_response({"status": "alive"})

    async def _ready(self, request: web.BaseRequest) -> web.Response:
        ready = self._fleet.ready
        workers = {f"{link.worker.role}/{link.worker.instance}": link.ready for link in self._fleet.links()}
        status = "ready" if ready else "waiting for a prefill and a decode worker"
        return web.json_response({"status": status, "workers": workers}, status=200 if ready else 503)

    async def _metrics_text(self, request: web.BaseRequest) -> web.Response:
        return web.Response(text=await self._metrics.render(), content_type="text/plain")


class _DirectWriter:
    """Writes deltas to the connection, past the handler, while the client keeps up. See event_queue.py."""

    def __init__(self, stream: EventStream, answer: ResponseWriter) -> None:
        self._stream = stream
        self._answer = answer

    def try_write(self, events: Sequence[Event]) -> bool:
        """See `DirectWriter`. The handler writes the end itself, because it must return then."""
        if not self._stream.is_ready or not events[-1].HasField("delta"):
            return False
        return self._stream.send_now(b"".join([self._answer.delta_event(event.delta) for event in events]))


def _make_request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
) -> web.BaseRequest:
    loop = asyncio.get_running_loop()
    size = bounds.MAX_BODY_BYTES
    return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=size)


async def _say_continue(request: web.BaseRequest) -> None:
    """To a client that waits for it before it sends its body (RFC 9110, 10.1.1)."""
    if request.version == HttpVersion11:
        if request.headers["Expect"].lower() != "100-continue":
            raise web.HTTPExpectationFailed
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def _headers(request: web.BaseRequest, run: RunningRequest) -> dict[str, str]:
    """Of an answer. `x-slipstream-debug: 1` asks why it runs where it runs: known once a token is there."""
    headers = {"x-request-id": run.request_id}
    if request.headers.get(DEBUG_HEADER) == "1" and (decision := run.decision()) is not None:
        headers[PLACEMENT_HEADER] = header_text(decision)
    return headers


def _reject_if_busy(given: str | None) -> bool:
    """The query parameter, for clients that send every option as one."""
    if given not in (None, "true", "false"):
        raise bounds.TYPE.refused("rejectIfBusy", expected="true or false")
    return given == "true"

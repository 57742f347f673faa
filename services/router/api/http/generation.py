"""The endpoints that generate: a body becomes one request for each choice, and their events one answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from libs.common.http.failure import failure_of
from libs.common.http.http_errors import failure_response
from libs.common.telemetry import tracing
from services.router.admission.tenant_shares import TextShares
from services.router.api.answers.answer_format import AnswerFormat, Json, ParsedBody
from services.router.api.answers.exchange import Exchange, read_exchange
from services.router.api.answers.whole import whole_of, whole_of_choices
from services.router.api.choices import ChoiceRuns
from services.router.api.http.answer_delivery import AnswerDelivery
from services.router.api.http.event_stream import EventStream
from services.router.api.http.ignored_header import ignored_header
from services.router.api.http.middleware import RECORD
from services.router.api.http.request_reader import RequestReader
from services.router.api.http.span_attributes import http_attributes, note_status
from services.router.execution.request_manager import RequestManager
from services.router.execution.running_request import RunningRequest
from services.router.placement.decision_json import DEBUG_HEADER, PLACEMENT_HEADER, header_text
from slipstream import errors

STATS_HEADER = "x-slipstream-stats"
# Proxies cut connections on which nothing is sent for a minute or less.
KEEP_ALIVE_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _HttpExchange:
    """A body that was read, and the HTTP request that brought it."""

    request: web.Request
    exchange: Exchange

    @property
    def needs_decision(self) -> bool:
        return self.request.headers.get(DEBUG_HEADER) == "1"

    def headers(self, run: RunningRequest | None) -> dict[str, str]:
        """The answer's headers. `x-slipstream-debug: 1` asks where it runs and why, known with a token."""
        headers = {"x-request-id": self.request[RECORD].request_id}
        headers |= ignored_header(self.exchange.options.ignored)
        decision = run.decision() if run is not None and self.needs_decision else None
        if decision is not None:
            headers[PLACEMENT_HEADER] = header_text(decision)
        return headers

    async def send_whole(
        self, body: Json, headers: Mapping[str, str], delivery: AnswerDelivery, *, stall_s: float
    ) -> web.StreamResponse:
        """Send an answer that is no stream. It may have megabytes, so the fast encoder writes it."""
        data, tenant = msgspec.json.encode(body), self.exchange.caller.tenant
        return await delivery.send_json(self.request, tenant, data, stall_s=stall_s, headers=headers)


class GenerationEndpoint:
    """Runs the requests of any format. Times are in seconds; see docs/bounds.md."""

    def __init__(
        self,
        manager: RequestManager,
        reader: RequestReader,
        *,
        clock: Callable[[], float],
        write_stall_s: float,
        sent: TextShares,
    ) -> None:
        self._manager = manager
        self._reader = reader
        self._clock = clock
        self.write_stall_s = write_stall_s
        self.keep_alive_s = KEEP_ALIVE_S
        self.delivery = AnswerDelivery(sent)

    async def generate(
        self, request: web.Request, *, path: str, answer_format: AnswerFormat
    ) -> web.StreamResponse:
        """The handler of a route. `path` is the route's, for spans and metrics."""
        if not tracing.enabled():
            return await self._run(request, path, answer_format)
        with (
            tracing.server_span(f"POST {path}", request.headers, begins=True),
            http_attributes(request, path),
        ):
            response = await self._run(request, path, answer_format)
            note_status(response.status)
            return response

    async def _run(self, request: web.Request, path: str, answer_format: AnswerFormat) -> web.StreamResponse:
        record = request[RECORD]
        record.trace_id = tracing.trace_id()
        caller = self._reader.caller(request, path)
        data = await self._reader.body(request, caller.tenant)
        arrived_s = self._clock()
        choices: ChoiceRuns | None = None
        try:
            read = await read_exchange(
                self._manager,
                answer_format,
                caller,
                data,
                request_id=record.request_id,
                encoding=request.headers.get("Content-Encoding", "").lower(),
                with_stats=request.headers.get(STATS_HEADER) == "1",
            )
            record.request_id = read.context.request_id
            exchange = _HttpExchange(request, read)
            if len(read.requests) > 1:
                choices = self._choices(exchange)
                await choices.start()
            else:
                run = await self._manager.begin(read.requests[0], read.caller, n_bytes=read.n_bytes)
        except errors.Overloaded as error:
            return await self._refuse(request, answer_format, error, arrived_s)
        if choices is not None:
            record.answer = choices
            return await self._answer_choices(exchange, choices)
        record.answer = run.sink
        run.timeline.is_streamed = read.options.stream
        try:
            run.sink.wants_stats = read.context.with_stats
            # An answer in one piece is not needed before its first token, nor known before where it runs.
            run.sink.holds_start = not read.options.stream or exchange.needs_decision
            if read.options.stream:
                return await self._stream(exchange, run)
            body = await whole_of(self._manager, read, run)
            headers = exchange.headers(run)
        finally:
            run.end()
        return await exchange.send_whole(body, headers, self.delivery, stall_s=self.write_stall_s)

    async def _refuse(
        self,
        request: web.Request,
        answer_format: AnswerFormat,
        error: errors.Overloaded,
        arrived_s: float,
    ) -> web.StreamResponse:
        tracing.failed(error)
        request[RECORD].fail(error)
        refusal = failure_response(error, answer_format.error_body)
        await refusal.prepare(request)
        await refusal.write_eof()
        self._manager.context.counters.observe("slipstream_refusal_seconds", self._clock() - arrived_s)
        return refusal

    async def _stream(self, exchange: _HttpExchange, run: RunningRequest) -> web.StreamResponse:
        headers = partial(exchange.headers, run)
        stream = EventStream(exchange.request, headers, write_stall_s=self.write_stall_s)
        stream.keep_open(self.keep_alive_s)
        try:
            opening, *events = await run.sink.next_events()
            stream.answer = await exchange.exchange.writer(opening.started)
            run.sink.direct_writer = stream
            salt = self._manager.context.salts.of_tenant(exchange.exchange.caller.tenant)
            make = partial(self._manager.context.fleet.batcher.run, salt)
            while events := events or await run.sink.next_events():
                if not events[-1].HasField("finished"):
                    await stream.send(await make(partial(stream.encode, events)))
                    events = []
                    continue
                make_next = partial(next, stream.encode_end(events), None)
                await _send_end(exchange.exchange.body, stream, partial(make, make_next))
                return stream.response
            raise errors.Internal("the response has no end")
        except Exception as error:
            if not stream.has_begun:
                raise  # a failure before the first byte gets its own status
            return await self._fail(exchange, stream, error)
        finally:
            stream.stop_comments()
            run.sink.direct_writer = None

    async def _fail(
        self, exchange: _HttpExchange, stream: EventStream, error: Exception
    ) -> web.StreamResponse:
        exchange.request[RECORD].fail(error)
        failure = failure_of(error)  # the error itself is kept in no variable: that would be a cycle
        tracing.failed(error)
        await stream.fail(exchange.exchange.format.error_events(failure, stream.answer))
        return stream.response

    def _choices(self, exchange: _HttpExchange) -> ChoiceRuns:
        read = exchange.exchange
        return ChoiceRuns(
            self._manager,
            read.requests,
            read.caller,
            n_bytes=read.n_bytes,
            wants_stats=read.context.with_stats,
            is_streamed=read.options.stream,
        )

    async def _answer_choices(self, exchange: _HttpExchange, choices: ChoiceRuns) -> web.StreamResponse:
        read = exchange.exchange
        try:
            if read.options.stream:
                return await self._stream_choices(exchange, choices)
            body = await whole_of_choices(self._manager, read, choices)
            headers = exchange.headers(choices.first)
        finally:
            choices.end()
        return await exchange.send_whole(body, headers, self.delivery, stall_s=self.write_stall_s)

    async def _stream_choices(self, exchange: _HttpExchange, choices: ChoiceRuns) -> web.StreamResponse:
        headers = partial(exchange.headers, choices.first)
        stream = EventStream(exchange.request, headers, write_stall_s=self.write_stall_s)
        body, context = exchange.exchange.body, exchange.exchange.context
        answer = body.choices_writer(context)
        salt = self._manager.context.salts.of_tenant(exchange.exchange.caller.tenant)
        make = partial(self._manager.context.fleet.batcher.run, salt)
        stream.keep_open(self.keep_alive_s)
        try:
            while (item := await choices.next_events()) is not None:
                await body.before_writer(context, item[0])
                await stream.send(await make(partial(answer.encode, *item)))
            await stream.send(answer.last_event(choices.leaders), is_last=True)
            return stream.response
        except Exception as error:
            if not stream.has_begun:
                raise  # a failure before the first byte gets its own status
            return await self._fail(exchange, stream, error)
        finally:
            stream.stop_comments()


async def _send_end(
    body: ParsedBody, stream: EventStream, make: Callable[[], Awaitable[tuple[bytes, int] | None]]
) -> None:
    """Send the pieces of `EventStream.encode_end`, which `make` makes. `before_end` comes amid them.

    Where it fails, the client gets what was made before `closing`: the events of the failure go on after it.
    """
    piece, may_close = await make(), False
    while piece is not None:
        data, n_before = piece
        piece = await make()
        if not may_close and (n_before < len(data) or piece is None):
            try:
                await body.before_end()
            except Exception:
                if stream.has_begun and n_before:
                    await stream.send(data[:n_before])
                raise
            may_close = True
        await stream.send(data, is_last=piece is None)

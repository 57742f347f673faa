"""The endpoints that generate: a body becomes one request for each choice, and their events one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from libs.common.http.http_errors import client_error, error_response
from libs.common.telemetry import tracing
from services.router.api.choices import ChoiceRuns, sum_usage
from services.router.api.http.content_encoding import decompress
from services.router.api.http.event_stream import Event, EventStream
from services.router.api.http.frame import RECORD
from services.router.api.http.request_reader import RequestReader
from services.router.api.http.span_attributes import http_attributes, note_status
from services.router.api.openai.ignored_fields import IGNORED_HEADER
from services.router.api.openai.request import Parser, ResponseOptions
from services.router.api.openai.response import DONE, ResponseShape, ResponseWriter
from services.router.execution.request_manager import RequestManager
from services.router.execution.running_request import RunningRequest
from services.router.placement.decision_json import DEBUG_HEADER, PLACEMENT_HEADER, header_text
from services.router.request.types import Caller, GenerationRequest, PromptInput
from services.router.request.validation import is_request_id
from slipstream import bounds, errors
from slipstream.v1 import router_pb2

STATS_HEADER = "x-slipstream-stats"
# Proxies cut connections on which nothing is sent for a minute or less.
KEEP_ALIVE_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Exchange:
    """One HTTP request as its handler needs it."""

    request: web.Request
    requests: Sequence[GenerationRequest]  # of the choices, at least one
    options: ResponseOptions
    caller: Caller
    n_bytes: int
    shape: ResponseShape

    @property
    def needs_decision(self) -> bool:
        return self.request.headers.get(DEBUG_HEADER) == "1"

    def headers(self, run: RunningRequest | None) -> dict[str, str]:
        """Of an answer. `x-slipstream-debug: 1` asks where it runs and why: known once a token is there."""
        headers = {"x-request-id": self.request[RECORD].request_id}
        if self.options.ignored:
            headers[IGNORED_HEADER] = self.options.ignored
        decision = run.decision() if run is not None and self.needs_decision else None
        if decision is not None:
            headers[PLACEMENT_HEADER] = header_text(decision)
        return headers


class GenerationEndpoint:
    """Runs chat and plain completions. Times are in seconds; see docs/bounds.md."""

    def __init__(
        self,
        runs: RequestManager,
        reader: RequestReader,
        *,
        clock: Callable[[], float],
        write_stall_s: float,
        keep_alive_s: float = KEEP_ALIVE_S,
    ) -> None:
        self._runs = runs
        self._reader = reader
        self._clock = clock
        self.write_stall_s = write_stall_s
        self.keep_alive_s = keep_alive_s

    async def generate(
        self, request: web.Request, *, path: str, parse: Parser, chat: bool
    ) -> web.StreamResponse:
        """The handler of a route; `parse` reads its bodies."""
        with (
            tracing.server_span(f"POST {path}", request.headers, begins=True),
            http_attributes(request, path),
        ):
            response = await self._run(request, path=path, parse=parse, chat=chat)
            note_status(response.status)
            return response

    async def _run(self, request: web.Request, *, path: str, parse: Parser, chat: bool) -> web.StreamResponse:
        record = request[RECORD]
        record.trace_id = tracing.trace_id()
        caller = self._reader.caller(request, path)
        data = await self._reader.body(request, caller.tenant)
        arrived_s = self._clock()
        try:
            exchange = await read_exchange(self._runs, request, caller, data, parse=parse, chat=chat)
            if len(exchange.requests) > 1:
                return await self._answer_choices(exchange)
            run = await self._runs.begin(exchange.requests[0], exchange.caller, n_bytes=exchange.n_bytes)
        except errors.Overloaded as error:
            return await self._refuse(request, error, arrived_s)
        record.answer = run.sink
        run.trail.is_streamed = exchange.options.stream
        try:
            run.sink.wants_stats = exchange.shape.with_stats
            # An answer in one piece is not needed before its first token, nor known before where it runs.
            run.sink.holds_start = not exchange.options.stream or exchange.needs_decision
            answer = self._stream if exchange.options.stream else self._whole
            return await answer(exchange, run)
        finally:
            run.end()

    async def _refuse(
        self, request: web.Request, error: errors.Overloaded, arrived_s: float
    ) -> web.StreamResponse:
        tracing.failed(error)
        request[RECORD].fail(error)
        refusal = error_response(error)
        await refusal.prepare(request)
        await refusal.write_eof()
        self._runs.context.counters.observe("slipstream_refusal_seconds", self._clock() - arrived_s)
        return refusal

    # ---- one choice

    async def _whole(self, exchange: _Exchange, run: RunningRequest) -> web.StreamResponse:
        opening, *events = await run.sink.next_events()
        answer = self.writer_of(exchange, opening.started, 0)
        while events:
            for event in events:
                if event.HasField("finished"):
                    return web.json_response(answer.body(event.finished), headers=exchange.headers(run))
                answer.add(event.delta)
            events = await run.sink.next_events()
        raise errors.Internal("the response has no end")

    async def _stream(self, exchange: _Exchange, run: RunningRequest) -> web.StreamResponse:
        stream = EventStream(
            exchange.request, partial(exchange.headers, run), write_stall_s=self.write_stall_s
        )
        try:
            opening, *events = await self._waiting(stream, run.sink.next_events)
            stream.answer = self.writer_of(exchange, opening.started, 0)
            run.sink.direct_writer = stream
            while events := events or await self._waiting(stream, run.sink.next_events):
                await stream.write(events)
                if events[-1].HasField("finished"):
                    return stream.response
                events = []
            raise errors.Internal("the response has no end")
        except Exception as error:
            if not stream.has_begun:
                raise  # a failure before the first byte gets its own status
            return await self._fail(exchange, stream, error)
        finally:
            run.sink.direct_writer = None

    async def _fail(self, exchange: _Exchange, stream: EventStream, error: Exception) -> web.StreamResponse:
        exchange.request[RECORD].fail(error)
        await stream.fail(client_error(error))  # kept in no variable: that would be a cycle
        return stream.response

    async def _waiting(self, stream: EventStream, read: Callable[[], Awaitable[T]]) -> T:
        """What `read` returns. Until the first event is written, comments keep the connection open."""
        while not stream.has_events:
            try:
                async with asyncio.timeout(self.keep_alive_s):
                    return await read()
            except TimeoutError:
                if not stream.has_events:
                    await stream.keep_alive()
        return await read()

    # ---- several choices

    async def _answer_choices(self, exchange: _Exchange) -> web.StreamResponse:
        choices = ChoiceRuns(
            self._runs,
            exchange.requests,
            exchange.caller,
            n_bytes=exchange.n_bytes,
            wants_stats=exchange.shape.with_stats,
            is_streamed=exchange.options.stream,
        )
        exchange.request[RECORD].answer = choices
        try:
            await choices.start()
            answer = self._stream_choices if exchange.options.stream else self._whole_choices
            return await answer(exchange, choices)
        finally:
            choices.end()

    async def _whole_choices(self, exchange: _Exchange, choices: ChoiceRuns) -> web.StreamResponse:
        parts = _Parts(self, exchange)
        while (item := await choices.next_events()) is not None:
            index, events = item
            for event in parts.after_start(index, events):
                if event.HasField("finished"):
                    parts.finished[index] = event.finished
                else:
                    parts.writers[index].add(event.delta)
        bodies = [parts.writers[index].choice(parts.finished[index]) for index in sorted(parts.writers)]
        body = parts.writers[0].body_of(bodies, parts.usage(choices.leaders), parts.finished[0])
        return web.json_response(body, headers=exchange.headers(choices.first))

    async def _stream_choices(self, exchange: _Exchange, choices: ChoiceRuns) -> web.StreamResponse:
        headers = partial(exchange.headers, choices.first)
        stream = EventStream(exchange.request, headers, write_stall_s=self.write_stall_s)
        parts = _Parts(self, exchange)
        try:
            while (item := await self._waiting(stream, choices.next_events)) is not None:
                await stream.send(parts.encode(*item))
            usage, stats = parts.usage(choices.leaders), exchange.shape.with_stats
            last = b""
            if exchange.shape.include_usage:
                last = parts.writers[0].usage_event(usage)
            elif stats:
                last = parts.writers[0].finish_event(parts.finished[0], with_stats=True)
            await stream.send(last + DONE, is_last=True)
            return stream.response
        except Exception as error:
            if not stream.has_begun:
                raise  # a failure before the first byte gets its own status
            return await self._fail(exchange, stream, error)

    def writer_of(self, exchange: _Exchange, started: router_pb2.Started, index: int) -> ResponseWriter:
        """What writes a choice of the answer."""
        shape = exchange.shape
        if exchange.options.echo:
            source = exchange.requests[index].input
            assert isinstance(source, PromptInput)
            text = source.prompt or self._runs.context.card.tokenizer.decode(
                source.token_ids, keep_special=True
            )
            shape = msgspec.structs.replace(shape, echo=text)
        return ResponseWriter(started, shape, index=index)


class _Parts:
    """The choices of one answer: the writer of each, and how those that are over ended."""

    def __init__(self, endpoint: GenerationEndpoint, exchange: _Exchange) -> None:
        self._endpoint = endpoint
        self._exchange = exchange
        self._created_unix_s = 0
        self.writers: dict[int, ResponseWriter] = {}
        self.finished: dict[int, router_pb2.Finished] = {}

    def after_start(self, index: int, events: Sequence[Event]) -> Sequence[Event]:
        """The events without `started`, which makes the choice's writer. All choices have one id and time."""
        if not events[0].HasField("started"):
            return events
        started = events[0].started
        self._created_unix_s = self._created_unix_s or started.created_unix_s
        started.created_unix_s = self._created_unix_s
        started.request_id = self._exchange.request[RECORD].request_id
        self.writers[index] = self._endpoint.writer_of(self._exchange, started, index)
        return events[1:]

    def encode(self, index: int, events: Sequence[Event]) -> bytes:
        """The events of a choice as chunks of the stream."""
        is_new = index not in self.writers
        events = self.after_start(index, events)
        writer = self.writers[index]
        data = writer.opening() if is_new else b""
        for event in events:
            if event.HasField("finished"):
                self.finished[index] = event.finished
                data += writer.finish_event(event.finished, with_stats=False)
            else:
                data += writer.delta_event(event.delta)
        return data

    def usage(self, leaders: frozenset[int]) -> router_pb2.Usage:
        """The usage of the whole answer."""
        return sum_usage([self.finished[index].usage for index in sorted(self.finished)], leaders)


async def read_exchange(
    runs: RequestManager, request: web.Request, caller: Caller, data: bytes, *, parse: Parser, chat: bool
) -> _Exchange:
    """Parse a body. Raises InvalidArgument naming the first field that does not fit."""
    record = request[RECORD]
    encoding = request.headers.get("Content-Encoding", "").lower()
    n_bytes = bounds.MAX_BODY_BYTES if encoding else len(data)
    counters = runs.context.counters
    try:
        requests, options = await runs.read(
            caller, lambda: parse(decompress(data, encoding), record.request_id), n_bytes=n_bytes
        )
    except errors.InvalidArgument:
        counters.add("slipstream_requests_refused_total")
        raise
    if is_request_id(requests[0].request_id):  # the one in the body goes before the header
        record.request_id = requests[0].request_id
    if options.n_ignored:
        counters.add("slipstream_ignored_fields_total", options.n_ignored)
    shape = ResponseShape(
        chat=chat,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage,
        with_stats=request.headers.get(STATS_HEADER) == "1",
        prompt_alone=options.prompt_alone,
    )
    return _Exchange(request, requests, options, caller.of_session(options.session), n_bytes, shape)

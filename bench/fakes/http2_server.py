"""The server side of gRPC on h2: calls, and the service that answers them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from h2.errors import ErrorCodes
from h2.events import DataReceived, Event, RequestReceived, StreamEnded, StreamReset

from bench.fakes.http2 import Header, Http2Connection, Http2Stream

OK, UNIMPLEMENTED = 0, 12  # of gRPC
_RESPONSE_HEADERS: Sequence[Header] = ((b":status", b"200"), (b"content-type", b"application/grpc"))


@dataclass(eq=False, kw_only=True)
class Call(Http2Stream):
    """One call as the server sees it."""

    connection: GrpcServerConnection
    headers: Sequence[Header]
    trailers: Sequence[Header] | None = None  # set at the end, sent behind the last data
    room: asyncio.Future[None] | None = None
    has_headers_sent: bool = False
    is_half_closed: bool = False  # the client has sent its last message
    is_over: bool = False

    @property
    def method(self) -> str:
        """The path, such as "/package.Service/Method"."""
        return dict(self.headers).get(b":path", b"").decode()

    @property
    def blocked(self) -> bool:
        """Whether data waits for the client's windows."""
        return bool(self.unsent)

    def send(self, message: bytes) -> None:
        """Queue a message until `flush`."""
        if not self.is_over and self.trailers is None:
            self._send_headers()
            self.connection.send(self, message)

    async def wait_for_room(self) -> None:
        """Return when no data waits for the client's windows, or when the call is over."""
        while self.unsent and not self.is_over:
            self.room = asyncio.get_running_loop().create_future()
            await self.room

    def finish(self, status: int = OK, trailers: Sequence[Header] = ()) -> None:
        """Queue the end of the call behind its last message."""
        if not self.is_over and self.trailers is None:
            self.trailers = [(b"grpc-status", b"%d" % status), *trailers]
            self.connection.send_allowed(self)

    def flush(self) -> None:
        """Write what the call's connection has queued."""
        self.connection.flush()

    def wake_writer(self) -> None:
        """End `wait_for_room`."""
        if self.room is not None and not self.room.done():
            self.room.set_result(None)
        self.room = None

    def _send_headers(self) -> None:
        if not self.has_headers_sent:
            self.has_headers_sent = True
            self.connection.http2.send_headers(self.stream_id, _RESPONSE_HEADERS)


class Service(Protocol):
    """Answers the calls of a connection, which flushes what these methods queue."""

    def opened(self, call: Call) -> None:
        """The headers of a call have arrived."""

    def asked(self, call: Call, message: bytes) -> None:
        """A message has arrived. The response may follow at any later time."""

    def half_closed(self, call: Call) -> None:
        """The client has sent its last message."""

    def left(self, call: Call) -> None:
        """The client has cancelled the call or disconnected."""


class GrpcServerConnection(Http2Connection):
    """One connection of one client."""

    def __init__(self, service: Service) -> None:
        super().__init__(is_client=False)
        self._service = service
        self._calls: dict[int, Call] = {}

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        for call in list(self._calls.values()):
            self._drop(call)

    def open_streams(self) -> Iterable[Http2Stream]:
        return self._calls.values()

    def handle(self, event: Event) -> None:
        if isinstance(event, RequestReceived):
            call = Call(event.stream_id, connection=self, headers=event.headers)
            self._calls[event.stream_id] = call
            self._service.opened(call)
        elif isinstance(event, DataReceived):
            self.http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if event.stream_id in self._calls:
                self._take_data(self._calls[event.stream_id], event)
        elif isinstance(event, StreamEnded) and event.stream_id in self._calls:
            self._calls[event.stream_id].is_half_closed = True
            self._service.half_closed(self._calls[event.stream_id])
        elif isinstance(event, StreamReset) and event.stream_id in self._calls:
            self._drop(self._calls[event.stream_id])

    def after_sending(self, stream: Http2Stream) -> None:
        assert isinstance(stream, Call)
        if stream.trailers is not None:
            first = () if stream.has_headers_sent else _RESPONSE_HEADERS
            self.http2.send_headers(stream.stream_id, [*first, *stream.trailers], end_stream=True)
            if not stream.is_half_closed:  # the client need not send the rest
                self.reset(stream.stream_id, ErrorCodes.NO_ERROR)
            self._remove(stream)
        stream.wake_writer()

    def _take_data(self, call: Call, event: DataReceived) -> None:
        try:
            for message in call.received.complete(event.data):
                self._service.asked(call, message)
        except ValueError:
            call.finish(UNIMPLEMENTED, [(b"grpc-message", b"messages are taken uncompressed")])
            self._service.left(call)

    def _drop(self, call: Call) -> None:
        self._remove(call)
        call.wake_writer()
        self._service.left(call)

    def _remove(self, call: Call) -> None:
        call.is_over = True
        call.unsent.clear()
        self._calls.pop(call.stream_id, None)

"""The client side of gRPC on h2, for load generators: serialised requests in, serialised responses out.

The caller checks whether a response is complete: this client does not read the status of a call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from h2.events import DataReceived, Event, StreamEnded, StreamReset

from bench.fakes.http2 import Http2Connection, Http2Stream


@dataclass(eq=False, kw_only=True)
class _Call(Http2Stream):
    on_message: Callable[[bytes], None]
    ended: asyncio.Future[None]

    def end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class GrpcConnection(Http2Connection):
    """One connection with any number of calls at a time. `call` raises ConnectionError when it breaks."""

    def __init__(self, authority: str) -> None:
        super().__init__(is_client=True)
        self._authority = authority
        self._calls: dict[int, _Call] = {}

    @property
    def is_closed(self) -> bool:
        """Whether a call on it would raise ConnectionError."""
        return self.transport is None or self.transport.is_closing()

    async def call(
        self,
        method: str,
        request: bytes,
        on_message: Callable[[bytes], None],
        *,
        metadata: Sequence[tuple[str, str]],
    ) -> None:
        """Send one request, pass each response to `on_message`, and return after the last one."""
        if self.is_closed:
            raise ConnectionResetError("the server closed the connection")
        stream_id = self.http2.get_next_available_stream_id()
        ended = asyncio.get_running_loop().create_future()
        call = self._calls[stream_id] = _Call(stream_id, on_message=on_message, ended=ended)
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", self._authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *metadata,
        ]
        self.http2.send_headers(stream_id, headers)
        self.send(call, request)
        self.flush()
        try:
            await ended
        finally:
            self._calls.pop(stream_id, None)

    def connection_lost(self, exc: Exception | None) -> None:
        for call in self._calls.values():
            if not call.ended.done():
                call.ended.set_exception(exc or ConnectionResetError("the connection ended amid a response"))

    def open_streams(self) -> Iterable[Http2Stream]:
        return self._calls.values()

    def after_sending(self, stream: Http2Stream) -> None:
        self.http2.end_stream(stream.stream_id)

    def handle(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            self.http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if event.stream_id in self._calls:
                for message in self._calls[event.stream_id].received.complete(event.data):
                    self._calls[event.stream_id].on_message(message)
        elif isinstance(event, StreamEnded | StreamReset) and event.stream_id in self._calls:
            self._calls[event.stream_id].end()

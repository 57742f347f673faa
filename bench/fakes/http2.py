"""gRPC messages on an HTTP/2 connection of the library h2, the same for the load's client and fake servers.

gRPC's own Python library costs a request up to a millisecond at either end, in a thread beside the event
loop, and on a small machine the router pays for it. One write carries everything that one loop iteration
sends. The windows of this side are as wide as HTTP/2 allows; data waits for the windows of the peer.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import ConnectionTerminated, Event, RemoteSettingsChanged, WindowUpdated
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

Header = tuple[bytes, bytes]

_FIRST_WINDOW_BYTES, _MAX_WINDOW_BYTES = 65_535, 2**31 - 1
_PREFIX_BYTES = 5  # of a message: a flag for compression and the length


def prefixed(message: bytes) -> bytes:
    """A message as DATA frames carry it."""
    return b"\x00" + len(message).to_bytes(4, "big") + message


class MessageReader:
    """Splits the data of one stream into messages."""

    def __init__(self) -> None:
        self._received = bytearray()

    def complete(self, data: bytes) -> Iterator[bytes]:
        """Each message that `data` completes; the rest waits for more. Raises ValueError for a compressed
        message, because neither side of a benchmark announces compression."""
        kept = self._received
        kept += data
        while len(kept) >= _PREFIX_BYTES:
            end = _PREFIX_BYTES + int.from_bytes(kept[1:_PREFIX_BYTES], "big")
            if kept[0]:
                raise ValueError("a compressed message")
            if end > len(kept):
                return
            message = bytes(kept[_PREFIX_BYTES:end])
            del kept[:end]
            yield message


@dataclass(eq=False)
class Http2Stream:
    """One call on a connection, as both ends keep it."""

    stream_id: int
    received: MessageReader = field(default_factory=MessageReader)
    unsent: deque[memoryview] = field(default_factory=deque)  # waits for the peer's windows


class Http2Connection(asyncio.Protocol, ABC):
    """One connection: bytes in, events to `handle`; what the streams send goes out with `flush`."""

    def __init__(self, *, is_client: bool) -> None:
        config = H2Configuration(
            client_side=is_client,
            header_encoding=None,
            validate_outbound_headers=False,
            normalize_outbound_headers=False,
            validate_inbound_headers=False,
            normalize_inbound_headers=False,
        )
        self.http2 = H2Connection(config)
        windows = {SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: _MAX_WINDOW_BYTES}
        self.http2.local_settings = Settings(client=is_client, initial_values=windows)
        self.transport: asyncio.Transport | None = None

    @abstractmethod
    def handle(self, event: Event) -> None:
        """React to an event that concerns a stream."""

    @abstractmethod
    def open_streams(self) -> Iterable[Http2Stream]:
        """The streams that may have unsent data."""

    def after_sending(self, stream: Http2Stream) -> None:
        """All data of the stream is sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        bound = transport.get_extra_info("socket")
        if bound is not None:  # asyncio sets it only on sockets that it created itself
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.http2.initiate_connection()
        self.http2.increment_flow_control_window(_MAX_WINDOW_BYTES - _FIRST_WINDOW_BYTES)
        self.flush()

    def data_received(self, data: bytes) -> None:
        try:
            events = self.http2.receive_data(data)
        except ProtocolError:
            self.flush()
            self.close()
            return
        for event in events:
            if isinstance(event, ConnectionTerminated):
                self.close()
            elif isinstance(event, WindowUpdated | RemoteSettingsChanged):
                for stream in [stream for stream in self.open_streams() if stream.unsent]:
                    self.send_allowed(stream)
            else:
                self.handle(event)
        self.flush()

    def send(self, stream: Http2Stream, message: bytes) -> None:
        """Queue a message until `flush`; what exceeds the peer's windows follows when they open."""
        stream.unsent.append(memoryview(prefixed(message)))
        if len(stream.unsent) == 1:
            self.send_allowed(stream)

    def send_allowed(self, stream: Http2Stream) -> None:
        """Queue as much of the stream's data as the peer's windows allow."""
        while stream.unsent:
            piece = stream.unsent[0]
            room = self.http2.local_flow_control_window(stream.stream_id)
            n_bytes = min(room, self.http2.max_outbound_frame_size, len(piece))
            if n_bytes <= 0:
                return
            self.http2.send_data(stream.stream_id, piece[:n_bytes])
            if n_bytes < len(piece):
                stream.unsent[0] = piece[n_bytes:]
            else:
                stream.unsent.popleft()
        self.after_sending(stream)

    def reset(self, stream_id: int, error: ErrorCodes) -> None:
        """End a stream at once; a stream that has already ended stays as it is."""
        with contextlib.suppress(ProtocolError):
            self.http2.reset_stream(stream_id, error)

    def flush(self) -> None:
        """Write what is queued."""
        data = self.http2.data_to_send()
        if data and self.transport is not None:
            self.transport.write(data)

    def close(self) -> None:
        """Close the connection after everything written has left."""
        if self.transport is not None:
            self.transport.close()

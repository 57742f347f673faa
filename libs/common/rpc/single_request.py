"""The request of a call that takes one message, read after the call's metadata was accepted.

gRPC reads the message of a unary call before any code of a service runs. A caller without a key would fill
the memory with it. On the wire a unary call and a stream of one request are equal. A host serves both as
streams, and the wrapped handler reads the message itself. What nothing reads stays in the flow-control window
of its connection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

import grpc
from google.protobuf.message import DecodeError

from libs.common.rpc.deadline_queue import HandlerDeadlines
from libs.common.service_bounds import REQUEST_READ_S
from slipstream import bounds
from slipstream.errors import InvalidArgument, SlipstreamError
from slipstream.rpc.rpc_errors import to_status

log = logging.getLogger(__name__)

Deserialize = Callable[[bytes], Any]
# Reads the message of a call: takes the name of its method, and its context.
ReadRequest = Callable[[str, Any], Awaitable[Any]]

_LOG_EVERY_S = 1.0


class _Status(NamedTuple):
    """A status as gRPC takes it."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


class MalformedRequests:
    """Counts the messages that do not parse, and logs one line a second for all of them."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._clock = clock
        self._logged = 0
        self._quiet_until_s = float("-inf")

    def note(self, method: str) -> None:
        """Count a message to this method."""
        self.count += 1
        now_s = self._clock()
        if now_s >= self._quiet_until_s:
            log.warning("%d malformed messages, the last to %s", self.count - self._logged, method)
            self._logged, self._quiet_until_s = self.count, now_s + _LOG_EVERY_S

    def checked(
        self, deserialize: Deserialize | None, method: str, *, most_bytes: int | None = None
    ) -> Deserialize | None:
        """The deserializer, which raises InvalidArgument for bytes that are not its message, or too many."""
        if deserialize is None and most_bytes is None:
            return None

        def parse(data: bytes) -> Any:
            if most_bytes is not None and len(data) > most_bytes:
                raise InvalidArgument("request", f"must have at most {most_bytes} bytes")
            if deserialize is None:
                return data
            try:
                return deserialize(data)
            except DecodeError:
                self.note(method)
            raise InvalidArgument("request", "is not a well-formed message of this method")

        return parse


class TimedReads:
    """Reads the message of each call, which has `timeout_s` to arrive. Made on an event loop."""

    def __init__(self, *, timeout_s: float = REQUEST_READ_S) -> None:
        self._deadlines = HandlerDeadlines(timeout_s, self._cancel)
        self._late: set[asyncio.Task[Any]] = set()

    async def read(self, _method: str, context: Any) -> Any:
        """The message of a call. Raises InvalidArgument when there is none in time.

        A second message is not read, as by gRPC's own unary methods in Python. To refuse it, every call needs
        a second read: 20 to 40 us of CPU, and a wait for clients that leave their side open.
        """
        handler = asyncio.current_task()
        assert handler is not None
        self._deadlines.add(handler)
        try:
            request = await context.read()
        except asyncio.CancelledError:
            if handler in self._late and not handler.uncancel():
                raise bounds.BODY_TIME.refused() from None
            raise
        finally:
            self._deadlines.remove(handler)
            self._late.discard(handler)
        if request is grpc.aio.EOF:
            raise InvalidArgument("request", "must be given")
        return request

    def _cancel(self, handler: asyncio.Task[Any]) -> None:
        self._late.add(handler)
        handler.cancel()


def with_trailing(status: grpc.Status, context: Any) -> grpc.Status:
    """The status with the trailing metadata that the handler has set: gRPC sends one or the other."""
    metadata = context.trailing_metadata()
    if not metadata:
        return status
    return cast(grpc.Status, _Status(status.code, status.details, (*status.trailing_metadata, *metadata)))


def refusing_handler(error: SlipstreamError, metadata: tuple[tuple[str, str | bytes], ...] = ()) -> Any:
    """A handler that reads nothing of its call and ends it with the error and this trailing metadata."""
    status = to_status(error)

    async def refuse(requests: Any, context: Any) -> None:
        context.set_trailing_metadata(metadata)
        await context.abort_with_status(with_trailing(status, context))

    return grpc.stream_stream_rpc_method_handler(refuse)

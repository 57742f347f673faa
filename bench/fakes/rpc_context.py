"""The requests and the context that `bench/fakes/rpc_server.py` gives to a handler."""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from urllib.parse import quote

import grpc

from bench.fakes.http2 import Header
from bench.fakes.http2_server import Call

Metadata = Sequence[tuple[str, str | bytes]]

_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TEXT = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class Requests:
    """The messages of a call in order; iterate once."""

    def __init__(self, parse: Callable[[bytes], Any] | None) -> None:
        self._parse = parse
        self._messages: deque[bytes] = deque()
        self._ended = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, message: bytes) -> None:
        """Add a message."""
        self._messages.append(message)
        self._wake()

    def end(self) -> None:
        """Mark the end of the messages."""
        self._ended = True
        self._wake()

    def __aiter__(self) -> Requests:
        return self

    async def __anext__(self) -> Any:
        while not self._messages:
            if self._ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        message = self._messages.popleft()
        return message if self._parse is None else self._parse(message)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None


class RpcContext:
    """The part of `grpc.aio.ServicerContext` that servicers use."""

    def __init__(self, call: Call, serialize: Callable[[Any], bytes] | None, requests: Requests) -> None:
        self._call = call
        self._requests = requests
        self._serialize = serialize
        self._metadata = metadata_of(call.headers)
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: Metadata = ()
        timeout_s = timeout_of(call.headers)
        self._until_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s

    async def read(self) -> Any:
        """The next request, or EOF."""
        return await anext(self._requests, grpc.aio.EOF)

    async def write(self, message: Any) -> None:
        """Send a response; returns when the client's window has room for the next one."""
        self.queue(message)
        self._call.flush()
        if self._call.blocked:
            await self._call.wait_for_room()

    def queue(self, message: Any) -> None:
        """Queue a response for the next write of the connection."""
        self._call.send(message if self._serialize is None else self._serialize(message))

    def invocation_metadata(self) -> Metadata:
        """The client's metadata, without the headers of HTTP/2 and gRPC."""
        return self._metadata

    def peer(self) -> str:
        """A name of the client's connection."""
        return f"connection:{id(self._call.connection)}"

    def time_remaining(self) -> float | None:
        """Seconds to the client's deadline; None without one."""
        if self._until_s is None:
            return None
        return max(0.0, self._until_s - asyncio.get_running_loop().time())

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Metadata = ()
    ) -> NoReturn:
        """End the call with this status."""
        self._code, self._details = code, details
        self._trailing = trailing_metadata or self._trailing
        raise grpc.aio.AbortError("aborted by its handler")

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        """End the call with this status."""
        await self.abort(status.code, status.details, tuple(status.trailing_metadata or ()))

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the status code for a handler that returns."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Set the status details for a handler that returns."""
        self._details = details

    def set_trailing_metadata(self, trailing_metadata: Metadata) -> None:
        """Set the metadata beside the status."""
        self._trailing = trailing_metadata

    def trailing_metadata(self) -> Metadata:
        """What `set_trailing_metadata` set."""
        return self._trailing

    def code(self) -> grpc.StatusCode | None:
        """The code that `set_code` or `abort` set."""
        return self._code

    def finish(self) -> None:
        """Send the status."""
        code = self._code or grpc.StatusCode.OK
        trailers = [(b"grpc-message", quote(self._details, safe=_TEXT).encode())] if self._details else []
        trailers += [_to_header(name, value) for name, value in self._trailing]
        self._call.finish(code.value[0], trailers)
        self._call.flush()


def metadata_of(headers: Sequence[Header]) -> Metadata:
    """A call's metadata; values of names in -bin are decoded."""
    found: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        if name.endswith(b"-bin"):
            found.append((name.decode(), base64.b64decode(value + b"=" * (-len(value) % 4))))
        elif not name.startswith((b":", b"grpc-")) and name not in (b"te", b"content-type"):
            found.append((name.decode(), value.decode()))
    return found


def timeout_of(headers: Sequence[Header]) -> float | None:
    """The client's time-out of the call in seconds."""
    for name, value in headers:
        if name == b"grpc-timeout":
            return int(value[:-1]) * _UNIT_S[value[-1:].decode()]
    return None


def _to_header(name: str, value: str | bytes) -> Header:
    if name.endswith("-bin"):
        data = value.encode() if isinstance(value, str) else value
        return name.encode(), base64.b64encode(data).rstrip(b"=")
    return name.encode(), value.encode() if isinstance(value, str) else value

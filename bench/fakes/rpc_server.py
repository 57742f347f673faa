"""A `grpc.aio.Server` on `bench/fakes/http2_server.py`, so that generated servicers run on h2.

    server = RpcServer()                                    # in place of grpc.aio.server()
    add_XServicer_to_server(servicer, server)

Handlers are coroutines, async generators, or coroutines that write their responses; their context is an
`RpcContext`. The server lacks TLS, compression, keep-alive pings, and limits of size or number.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import socket
import weakref
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from bench.fakes.http2_server import Call, GrpcServerConnection
from bench.fakes.rpc_context import Requests, RpcContext

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Details:
    """`grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: Any


@dataclass(eq=False, slots=True)
class _Rpc:
    requests: Requests
    context: RpcContext
    task: asyncio.Task[None]
    deadline: asyncio.TimerHandle | None = None
    ended_by: tuple[grpc.StatusCode, str] = (grpc.StatusCode.CANCELLED, "cancelled")


class RpcServer(grpc.aio.Server):
    """A gRPC server, and the `Service` of its connections."""

    def __init__(
        self,
        *,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        options: Sequence[Any] = (),
        maximum_concurrent_rpcs: int | None = None,
    ) -> None:
        """`options` and `maximum_concurrent_rpcs` have no effect."""
        self._interceptors = interceptors
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._sockets: list[socket.socket] = []
        self._listeners: list[asyncio.Server] = []
        self._connections: weakref.WeakSet[GrpcServerConnection] = weakref.WeakSet()
        self._rpcs: dict[Call, _Rpc] = {}
        self._stopped = asyncio.Event()

    # ---- grpc.aio.Server

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        self._handlers.extend(generic_rpc_handlers)

    def add_insecure_port(self, address: str) -> int:
        """Bind at once, accept from `start` on. Raises RuntimeError."""
        host, _, port = address.rpartition(":")
        try:
            bound = socket.create_server((host, int(port)), backlog=1024)
        except OSError as error:
            raise RuntimeError(f"{address}: {error}") from error
        self._sockets.append(bound)
        found: int = bound.getsockname()[1]
        return found

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        raise RuntimeError("this server has no TLS")

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for bound in self._sockets:
            self._listeners.append(await loop.create_server(self._connection, sock=bound))

    async def stop(self, grace: float | None) -> None:
        """End all calls as UNAVAILABLE, at once: the load of a benchmark ends before its workers."""
        for listener in self._listeners:
            listener.close()
        for bound in self._sockets:
            bound.close()
        tasks = [rpc.task for rpc in self._rpcs.values()]
        for call in list(self._rpcs):
            self._end(call, grpc.StatusCode.UNAVAILABLE, "the server stops")
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self._connections):
            connection.close()
        self._stopped.set()

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._stopped.wait()
        except TimeoutError:
            return True
        return False

    # ---- Service

    def opened(self, call: Call) -> None:
        details = _Details(call.method, None)
        handler = self._handler(details)
        requests = Requests(handler.request_deserializer if handler is not None else None)
        context = RpcContext(call, handler.response_serializer if handler is not None else None, requests)
        details = _Details(call.method, context.invocation_metadata())
        task = asyncio.create_task(self._run(details, requests, context))
        rpc = self._rpcs[call] = _Rpc(requests, context, task)
        left_s = context.time_remaining()
        if left_s is not None:
            late = (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
            rpc.deadline = asyncio.get_running_loop().call_later(left_s, self._end, call, *late)
        task.add_done_callback(functools.partial(self._ended, call))

    def asked(self, call: Call, message: bytes) -> None:
        rpc = self._rpcs.get(call)
        if rpc is not None:
            rpc.requests.put(message)

    def half_closed(self, call: Call) -> None:
        rpc = self._rpcs.get(call)
        if rpc is not None:
            rpc.requests.end()

    def left(self, call: Call) -> None:
        rpc = self._rpcs.get(call)
        if rpc is not None:
            rpc.task.cancel()

    # ---- one call

    def _connection(self) -> GrpcServerConnection:
        connection = GrpcServerConnection(self)
        self._connections.add(connection)
        return connection

    def _end(self, call: Call, code: grpc.StatusCode, details: str) -> None:
        rpc = self._rpcs.get(call)
        if rpc is not None:
            rpc.ended_by = code, details
            rpc.task.cancel()

    def _ended(self, call: Call, task: asyncio.Task[None]) -> None:
        rpc = self._rpcs.pop(call)
        if rpc.deadline is not None:
            rpc.deadline.cancel()
        if task.cancelled():  # also before its first step
            code, details = rpc.ended_by
            rpc.context.set_code(code)
            rpc.context.set_details(details)
            rpc.context.finish()

    def _handler(self, details: _Details) -> grpc.RpcMethodHandler[Any, Any] | None:
        for handlers in self._handlers:
            handler = handlers.service(details)
            if handler is not None:
                return handler
        return None

    async def _intercepted(self, details: _Details) -> Any:
        async def served(details: Any) -> Any:
            return self._handler(details)

        ask: Callable[[Any], Awaitable[Any]] = served
        for interceptor in reversed(self._interceptors):
            ask = functools.partial(interceptor.intercept_service, ask)
        return await ask(details)

    async def _run(self, details: _Details, requests: Requests, context: RpcContext) -> None:
        try:
            handler = await self._intercepted(details)
            if handler is None:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            await _handle(handler, requests, context)
        except grpc.aio.AbortError:
            pass  # the context has the status
        except Exception as error:
            log.exception("%s failed", details.method)
            context.set_code(grpc.StatusCode.UNKNOWN)
            context.set_details(f"Unexpected {type(error)}: {error}")
        context.finish()


async def _handle(handler: Any, requests: Requests, context: RpcContext) -> None:
    inner = (
        handler.stream_stream or handler.stream_unary
        if handler.request_streaming
        else handler.unary_stream or handler.unary_unary
    )
    request = requests if handler.request_streaming else await anext(requests, None)
    if request is None:
        await context.abort(grpc.StatusCode.INTERNAL, "a call without its request")
    if inspect.isasyncgenfunction(inner):
        async with aclosing(inner(request, context)) as responses:
            async for response in responses:
                await context.write(response)
        return
    response = await inner(request, context)
    if not handler.response_streaming:
        context.queue(response)

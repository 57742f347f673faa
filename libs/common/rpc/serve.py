"""Run one gRPC service as a good process.

    host = ServiceHost("127.0.0.1:0")
    add_XServicer_to_server(servicer, host.server)
    await host.start(["slipstream.v1.XService"])   # health: "liveness" SERVING, "readiness" NOT_SERVING
    await host.set_ready(True)                     # health: "readiness", "", each service: SERVING
    await host.wait_for_stop()                     # SIGTERM, SIGINT or host.request_stop()
    await host.stop(grace_s=5)                     # NOT_SERVING first, then calls in flight get `grace_s`

Errors of the tree in `slipstream/errors.py` leave as rich gRPC statuses; anything else is logged
with its traceback and leaves as INTERNAL without details.

An interceptor that raises such an error refuses the call before any of its message is read.

Half-open clients: gRPC closes a connection whose TLS or HTTP/2 handshake is not done within GRPC_HANDSHAKE_S.
It also closes one, with calls or without, whose peer does not answer a ping. A call whose message does not
arrive within REQUEST_READ_S is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.trace import Span

from libs.common.rpc.access import AccessControl, AccessInterceptor, OnRefused, check_address, ignore_refusal
from libs.common.rpc.access_table import HEALTH_SERVICE, most_request_bytes
from libs.common.rpc.call_reset import reset_call, reset_unless_read
from libs.common.rpc.call_room import CallRoom
from libs.common.rpc.deadline_queue import HandlerDeadlines
from libs.common.rpc.endpoints import advertised_endpoint
from libs.common.rpc.handshake_watch import HandshakeWatch
from libs.common.rpc.health import HealthService
from libs.common.rpc.single_request import (
    MalformedRequests,
    ReadRequest,
    TimedReads,
    refusing_handler,
    with_trailing,
)
from libs.common.runtime.signals import stop_on_signals
from libs.common.service_bounds import (
    GRPC_CALLS,
    GRPC_CONNECTION_CALLS,
    GRPC_CONNECTIONS,
    GRPC_HANDSHAKE_S,
    GRPC_PING_ANSWER_S,
    GRPC_PING_S,
    GRPC_PUBLIC_ARRIVING,
    GRPC_PUBLIC_CALLS,
    GRPC_PUBLIC_READ_S,
    GRPC_PUBLIC_REQUEST_BYTES,
    GRPC_WINDOW_BYTES,
    WRITE_STALL_S,
)
from libs.common.telemetry import tracing
from libs.common.telemetry.certificate_expiry import CertificateExpiry
from libs.common.telemetry.paced_warnings import PacedWarnings
from slipstream import errors
from slipstream.errors import InvalidArgument
from slipstream.rpc import dial
from slipstream.rpc.hosts import is_wildcard
from slipstream.rpc.rpc_errors import UNIMPLEMENTED, to_status
from slipstream.rpc.tls import TlsFiles

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

LIVENESS = "liveness"
READINESS = "readiness"
_OVERALL = ""

# Makes the bound around a call.
Room = Callable[[Context], contextlib.AbstractContextManager[Any]]
_NO_BOUND = contextlib.nullcontext()
_PING_MS, _PING_ANSWER_MS = int(GRPC_PING_S * 1000), int(GRPC_PING_ANSWER_S * 1000)
_OPTIONS: list[tuple[str, int]] = [
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.keepalive_timeout_ms", _PING_ANSWER_MS),
    # The limit for an unanswered ping; without it a vanished client is closed after a minute.
    ("grpc.http2.ping_timeout_ms", _PING_ANSWER_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", _PING_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", dial.MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", dial.MAX_MESSAGE_BYTES),
    # What a connection may send before a handler reads it. A probe of the bandwidth would raise it to MiBs.
    ("grpc.http2.lookahead_bytes", GRPC_WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),
    # gRPC reads into buffers of this size, whatever the windows are: 4 MiB a connection by default.
    ("grpc.experimental.tcp_max_read_chunk_size", GRPC_WINDOW_BYTES),
    ("grpc.max_concurrent_streams", GRPC_CONNECTION_CALLS),
    ("grpc.max_allowed_incoming_connections", GRPC_CONNECTIONS),
    # Two processes on one port would split the traffic silently.
    ("grpc.so_reuseport", 0),
]


class ServiceHost:
    """One gRPC server with health, reflection, error mapping and an orderly end."""

    def __init__(
        self,
        listen: str,
        *,
        tls: TlsFiles | None = None,
        access: AccessControl | None = None,
        has_reflection: bool = True,
        flag: str = "--listen",
        names: Sequence[str] = (),
        advertise: str = "",
        options: Sequence[tuple[str, int]] = (),
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        front_doors: Collection[str] = (),
        read: ReadRequest | None = None,
        on_refused: OnRefused = ignore_refusal,
        make_server: Callable[..., grpc.aio.Server] = grpc.aio.server,
    ) -> None:
        """`front_doors`: full names of the methods whose calls may begin a trace.

        `endpoint` is what others dial: `advertise`, or without it what was bound.
        `names`: endpoints by which callers dial the port, beside `endpoint`; their tokens name them.

        `access` is the rule for callers; without one every caller is admitted. `on_refused` gets each refused
        call's method and error. `read` receives the message of a call that takes one. Raises InvalidArgument
        for a port that admits everyone on an address that is not loopback; it names the `flag`.
        """
        access = access or AccessControl(has_peer_certificates=tls is not None)
        check_address(listen, is_open=access.is_open and tls is None, flag=flag)
        # One value for a name: of two, gRPC takes the first.
        merged = {**dict(_OPTIONS), "grpc.server_handshake_timeout_ms": int(GRPC_HANDSHAKE_S * 1000)}
        merged.update(options)
        self.malformed = MalformedRequests()
        self._certificate = CertificateExpiry(tls.certificate if tls is not None else None)
        handshakes = HandshakeWatch(PacedWarnings(log))
        self.server = make_server(
            interceptors=[
                AccessInterceptor(access, on_refused, on_call=handshakes.note_call),
                ErrorInterceptor(front_doors, self.malformed, read, access.public_methods),
                *interceptors,
            ],
            options=list(merged.items()),
            maximum_concurrent_rpcs=GRPC_CALLS,
        )
        self.port = self._open_port(listen, tls, handshakes)
        self.bound = f"{listen.rpartition(':')[0]}:{self.port}"
        self.endpoint = advertised_endpoint(self.bound, advertise)
        access.answer_to(self.bound, (self.endpoint, *names))
        if is_wildcard(self.endpoint):
            log.warning(
                "no other machine can dial %s: set --advertise where there are several", self.endpoint
            )
        self._health = HealthService()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        self._service_names: tuple[str, ...] = ()
        self._has_reflection = has_reflection
        self._stopping = asyncio.Event()

    def _open_port(self, listen: str, tls: TlsFiles | None, handshakes: HandshakeWatch) -> int:
        """The port that was bound. Raises Unavailable."""
        try:
            if tls is None:
                return self.server.add_insecure_port(listen)
            # gRPC calls them at each handshake.
            self._credentials = tls.server_credentials(handshakes.note_handshake)
            return self.server.add_secure_port(listen, self._credentials)
        except RuntimeError as error:
            raise errors.Unavailable(f"cannot listen on {listen}: {error}") from error

    async def start(self, service_names: Sequence[str]) -> None:
        """Serve. Alive at once; ready only after `set_ready`. Names are full ones."""
        self._service_names = tuple(service_names)
        if self._has_reflection:
            reflection.enable_server_reflection(
                [*service_names, reflection.SERVICE_NAME, HEALTH_SERVICE], self.server
            )
        await self.server.start()
        self._health.set_serving(LIVENESS, True)
        await self.set_ready(False)

    async def set_ready(self, ready: bool) -> None:
        """Set whether the process takes new work. Liveness is not touched."""
        for name in (READINESS, _OVERALL, *self._service_names):
            self._health.set_serving(name, ready)

    def figures(self) -> dict[str, float]:
        """The host's metrics."""
        return {"slipstream_grpc_malformed_total": self.malformed.count, **self._certificate.figures()}

    def request_stop(self) -> None:
        """Make `wait_for_stop` return."""
        self._stopping.set()

    async def wait_for_stop(self) -> None:
        """Return at SIGTERM, SIGINT or `request_stop`. The same signal again ends the process at once."""
        stop_on_signals(self._stopping.set)
        await self._stopping.wait()

    async def stop(self, *, grace_s: float = 5.0) -> None:
        """NOT_SERVING first, so that clients send no more; then calls in flight get `grace_s` to end."""
        self._health.end()
        await self.server.stop(grace_s)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Typed errors become rich statuses; a call is a span of the caller's trace.

    A call that takes many requests has no span: it lives as long as the two processes, and each request has
    its trace.
    """

    def __init__(
        self,
        front_doors: Collection[str],
        malformed: MalformedRequests,
        read: ReadRequest | None = None,
        public_methods: Collection[str] = (),
    ) -> None:
        self._reads = TimedReads()
        self._read = read or self._reads.read
        self._unread = HandlerDeadlines(WRITE_STALL_S, reset_call)
        self._public_methods, self._front_doors = public_methods, frozenset(front_doors)
        self._malformed, self._arriving = malformed, CallRoom(GRPC_PUBLIC_ARRIVING)
        self._wrapped: dict[str, tuple[Any, Any]] = {}  # by method: its handler, and that wrapped

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        try:
            handler = await continuation(handler_call_details)
        except errors.SlipstreamError as error:
            return refusing_handler(error)
        if handler is None:
            return None
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = (handler, self._wrap(handler, method))
        return known[1]

    def _wrap(self, handler: Any, method: str) -> Any:
        streaming = handler.response_streaming
        make = grpc.stream_stream_rpc_method_handler if streaming else grpc.stream_unary_rpc_method_handler
        inner = handler.stream_stream or handler.stream_unary or handler.unary_stream or handler.unary_unary
        # Without keys and open for hours: health, reflection, and what a port opens to all.
        is_public = method.startswith("/grpc.") or method in self._public_methods
        traced = not handler.request_streaming and not is_public
        # One room for each method: streams that watch take no place of a probe.
        room = functools.partial(_enter, CallRoom(GRPC_PUBLIC_CALLS)) if is_public else _unbounded
        read = self._read_public if is_public else self._read
        served = _ServedMethod(
            method,
            read=None if handler.request_streaming else read,
            is_traced=traced,
            begins_traces=traced and method in self._front_doors,
            room=room,
        )
        is_generator = inspect.isasyncgenfunction(inner)
        wrapped = _wrap_stream(inner, served) if is_generator else _wrap_call(inner, served, self._unread)
        most_bytes = GRPC_PUBLIC_REQUEST_BYTES if is_public else most_request_bytes(method)
        parse = self._malformed.checked(handler.request_deserializer, method, most_bytes=most_bytes)
        return make(wrapped, parse, handler.response_serializer)

    async def _read_public(self, method: str, context: Context) -> Any:
        """The message of a call without a key, which gets less time than others. Raises InvalidArgument.

        It waits for no other call, and takes no tenant's share of the messages that arrive.
        """
        with _enter(self._arriving, context):
            try:
                async with asyncio.timeout(GRPC_PUBLIC_READ_S):
                    return await self._reads.read(method, context)
            except TimeoutError:
                raise InvalidArgument("request", f"must arrive within {GRPC_PUBLIC_READ_S:g} s") from None


def _unbounded(context: Context) -> contextlib.AbstractContextManager[Any]:
    return _NO_BOUND


def _enter(room: CallRoom, context: Context) -> contextlib.AbstractContextManager[Any]:
    """Be one of the room's calls. The oldest call is reset when the room is full."""
    handler = asyncio.current_task()
    assert handler is not None
    return room.entered(context.peer(), functools.partial(reset_call, handler))


@dataclass(frozen=True, slots=True)
class _ServedMethod:
    """A method, and what surrounds each call of it. `read`: None where the handler reads its requests."""

    name: str
    read: ReadRequest | None
    is_traced: bool
    begins_traces: bool
    room: Room

    def span(self, context: Context, *, current: bool = True) -> contextlib.AbstractContextManager[Span]:
        carrier: tracing.Carrier = functools.partial(metadata_of, context) if self.is_traced else {}
        return tracing.server_span(self.name[1:], carrier, begins=self.begins_traces, current=current)


def _wrap_call(
    inner: Callable[..., Awaitable[Any]], method: _ServedMethod, unread: HandlerDeadlines
) -> Callable[..., Awaitable[Any]]:
    """Wrap a handler that returns its response, or writes its responses itself."""

    async def call(request: Any, context: Context) -> Any:
        try:
            with method.room(context):
                if method.read is not None:
                    request = await method.read(method.name, context)
                if tracing.enabled():
                    with method.span(context):
                        response = await inner(request, context)
                else:
                    response = await inner(request, context)
            reset_unless_read(unread)  # gRPC writes the response, and waits for the client to read it
            return response
        except grpc.aio.AbortError:
            del request, context  # see _status_of
            raise
        except Exception as error:
            status = _status_of(error, method.name, context)
        abort = context.abort_with_status(with_trailing(status, context))
        del request, context
        await abort

    return call


def _wrap_stream(
    inner: Callable[..., AsyncIterator[Any]], method: _ServedMethod
) -> Callable[..., AsyncIterator[Any]]:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        stream: Any = None
        # The span is opened without being made current: a generator may be resumed in another context.
        with method.span(context, current=False) as opened:
            try:
                with method.room(context):
                    if method.read is not None:
                        request = await method.read(method.name, context)
                    stream = inner(request, context)
                    async for response in stream:
                        yield response
                return
            except grpc.aio.AbortError:
                del request, context
                raise
            except Exception as error:
                status = _status_of(error, method.name, context)
                tracing.failed(error, opened)
            finally:
                if stream is not None:
                    await stream.aclose()
        abort = context.abort_with_status(with_trailing(status, context))
        del request, context
        await abort

    return call


def metadata_of(context: Context) -> dict[str, str]:
    """A call's metadata; of several values of a name the last."""
    pairs = context.invocation_metadata() or ()
    return {key: value if isinstance(value, str) else value.decode("latin-1") for key, value in pairs}


def _status_of(error: Exception, method: str, context: Context) -> grpc.Status:
    """The status that the caller receives.

    gRPC keeps the exception that an abort raises, which keeps the frames that it passed, and what led to it.
    A frame that referred to the call, or an error that was being handled, would keep all of it until the
    garbage collector runs. Refusals come by the hundred: it would run in the middle of one.
    """
    left_out = context.code() is grpc.StatusCode.UNIMPLEMENTED  # as the stubs say
    if left_out and isinstance(error, NotImplementedError):
        return UNIMPLEMENTED
    if not isinstance(error, errors.SlipstreamError):
        log.exception("%s failed", method)
        error = errors.Internal("internal error")
    return to_status(error)

"""Connections of HTTP clients, and the answer to what is no HTTP message.

aiohttp answers a malformed message in plain text, and logs it with the offending line, which may hold a key
or a prompt. Here the answer has OpenAI's error shape, and the log names the kind of defect only.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import (
    BadStatusLine,
    ContentEncodingError,
    InvalidHeader,
    InvalidURLError,
    LineTooLong,
)
from aiohttp.web_protocol import RequestPayloadError

from libs.common.api_bounds import MAX_TARGET_BYTES
from libs.common.connection_shares import ConnectionShare, ConnectionShares
from libs.common.http.answer_watch import AnswerWatch
from libs.common.http.chunked_body import ArrivingBody, read_plain_in_small_pieces
from libs.common.http.failure import HttpRefusal
from libs.common.http.http_errors import failure_response, new_request_id
from libs.common.http.tls_handshake import Accepted, TlsHandshakes, read_in_small_pieces
from libs.common.service_bounds import (
    HTTP_CONNECTIONS,
    HTTP_UNSENT_BYTES,
    HTTP_UNWRITTEN_BYTES,
    WRITE_STALL_S,
)
from libs.common.telemetry.counters import Counters
from slipstream import errors
from slipstream.rpc.tls import FilesVersion, TlsFiles

log = logging.getLogger(__name__)

SERVER_NAME = "slipstream"
_LOG_INTERVAL_S = 1.0
_SHUTDOWN_S = 1.0
_BACKLOG = 128


# Gets a request that no handler sees, and returns its id.
OnUnexpected = Callable[[web.BaseRequest], str]


class UnknownExpectation(HttpProcessingError):
    """An `Expect` header that asks for something else than 100 Continue."""

    code = 417

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id


_REFUSALS: tuple[tuple[type[Exception], int, str], ...] = (
    (ContentEncodingError, 415, "the Content-Encoding is not supported"),
    (LineTooLong, 431, "a line of the HTTP header is too long"),
    (InvalidHeader, 400, "a header of the HTTP message is malformed"),
    (InvalidURLError, 400, "the target of the HTTP request is malformed"),
    (BadStatusLine, 400, "the request line of the HTTP message is malformed"),
    (UnknownExpectation, 417, "the Expect header must be 100-continue"),
)


class MalformedMessages:
    """Counts malformed HTTP messages, and logs one line a second at most, without their content."""

    def __init__(self, counters: Counters, *, clock: Callable[[], float]) -> None:
        self.counters = counters
        self._clock = clock
        self._logged_s = float("-inf")
        self._n_unlogged = 0

    def note(self, defect: BaseException | None, peer: str | None) -> None:
        """Count one message. `peer` is the client's address."""
        self.counters.add("slipstream_http_malformed_total")
        now_s = self._clock()
        if now_s - self._logged_s < _LOG_INTERVAL_S:
            self._n_unlogged += 1
            return
        log.warning(
            "malformed HTTP message (%s) from %s; %d more since the last such line",
            type(defect).__name__,
            peer,
            self._n_unlogged,
        )
        self._logged_s, self._n_unlogged = now_s, 0


class HttpConnection(web.RequestHandler):
    """One client's connection. `is_refused`: it is closed at once, because there are too many."""

    __slots__ = ("_answer_watch", "_body", "_is_refused", "_malformed", "_shares", "_write_stall_s", "share")

    def __init__(
        self,
        server: web.Server,
        *,
        malformed: MalformedMessages,
        keepalive_s: float,
        shares: ConnectionShares,
        share: ConnectionShare | None = None,
        write_stall_s: float = WRITE_STALL_S,
        is_refused: bool = False,
    ) -> None:
        """`share`: that of the connection, where it was counted before."""
        loop = asyncio.get_running_loop()
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=keepalive_s,
            access_log=None,  # type: ignore[arg-type]
            auto_decompress=False,  # see content_encoding.py
            max_line_size=MAX_TARGET_BYTES,
        )
        self._malformed = malformed
        self._is_refused = is_refused
        self._shares = shares
        self._write_stall_s = write_stall_s
        self.share = share
        self._answer_watch: AnswerWatch | None = None
        self._body: ArrivingBody | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to serve, or close."""
        super().connection_made(transport)
        _bound_unread(transport, self._write_stall_s)
        read_plain_in_small_pieces(transport)
        if self.share is None:
            self.share = ConnectionShare(self._shares, _address_of(transport))
        if not self._is_refused and not self.share.fits:
            self._is_refused = True
            self._malformed.counters.add("slipstream_http_connections_refused_total")
        if self._is_refused:
            self.force_close()

    def data_received(self, data: bytes) -> None:
        """Take bytes of the client. A body in too small chunks fails, and is the connection's last."""
        n_requests = self._request_count
        super().data_received(data)
        if self._request_count != n_requests:  # the last one's body is the one that arrives
            self._body = ArrivingBody(self._messages[-1][1])
        elif self._body is not None and self._body.is_refused(len(data)):
            self._body = None
            self.close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Give the share back."""
        if self.share is not None:
            self.share.leave()
        if self._answer_watch is not None:
            self._answer_watch.cancel()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write what is left of a response, for a client that takes it."""
        transport = self.transport
        if self._answer_watch is not None:
            self._answer_watch.cancel()  # of the response before
        watch = None
        # Of a stream that its handler has written and the kernel has taken, only the end is left.
        if transport is not None and (not resp.prepared or transport.get_write_buffer_size()):
            watch = AnswerWatch(transport, self._write_stall_s)
        self._answer_watch = watch
        try:
            return await super().finish_response(request, resp, start_time)
        finally:
            if watch is not None and transport is not None and not transport.get_write_buffer_size():
                watch.cancel()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The last answer of a connection: to a malformed message, or after a defect outside the handlers.

        Raises ConnectionError where no answer can follow; aiohttp then ends the connection.
        """
        if isinstance(exc, ConnectionError) and (request.transport is None or request.transport.is_closing()):
            raise exc  # the client left during the answer, which is no defect
        self.log_exception("the connection ended", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionError("the response has begun")
        if isinstance(exc, HttpProcessingError):
            response = failure_response(_refusal(exc))
        else:
            response = failure_response(errors.Internal("internal error"))
        response.headers["Server"] = SERVER_NAME
        known_id = exc.request_id if isinstance(exc, UnknownExpectation) else ""
        response.headers["x-request-id"] = known_id or new_request_id()
        response.force_close()
        return response

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log what a connection raised. A malformed message is the client's fault."""
        error = kw.get("exc_info")
        if isinstance(error, (HttpProcessingError, RequestPayloadError)):
            name = self.peername
            self._malformed.note(error, name[0] if isinstance(name, tuple) else None)
        else:
            log.error(*args, **kw)


def _name_only(_: web.BaseRequest) -> str:
    return new_request_id()


class HttpListener:
    """Accepts connections for an application. Times are in seconds."""

    def __init__(
        self,
        application: web.Application,
        listening: socket.socket,
        *,
        tls: TlsFiles | None,
        malformed: MalformedMessages,
        keepalive_s: float,
        max_connections: int = HTTP_CONNECTIONS,
        shares: ConnectionShares | None = None,
        write_stall_s: float = WRITE_STALL_S,
        on_unexpected: OnUnexpected = _name_only,
    ) -> None:
        """A connection without a whole request header is closed after `keepalive_s`, one whose client reads
        nothing of an answer after `write_stall_s`.

        `on_unexpected` gets each request that the listener refuses for its Expect header, and returns its id.
        """
        # A client that disconnects ends its request.
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
        self._listening = listening
        self._tls = tls
        self._malformed = malformed
        self._keepalive_s = keepalive_s
        self._max_connections = max_connections
        self._shares = shares or ConnectionShares()
        self._write_stall_s = write_stall_s
        self._on_unexpected = on_unexpected
        self._acceptor: asyncio.Server | None = None
        self._context: ssl.SSLContext | None = None
        self._version: FilesVersion | None = None  # of the certificate in `_context`
        self._handshakes = TlsHandshakes()

    async def start(self) -> None:
        """Accept connections. Raises OSError for a certificate that cannot be read."""
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        server.request_handler = partial(_expect_continue, server.request_handler, self._on_unexpected)
        if self._tls is not None:
            self._version, self._context = self._tls.version(), server_context(self._tls)
            read_in_small_pieces()
        self._acceptor = await asyncio.get_running_loop().create_server(
            self._connect if self._tls is None else lambda: Accepted(self._begin_handshake),
            sock=self._listening,
            backlog=_BACKLOG,
        )

    async def stop(self) -> None:
        """Close all connections. A handler has a second to write its last event."""
        if self._acceptor is not None:
            self._acceptor.close()
        self._handshakes.cancel()
        await self._runner.cleanup()

    def _begin_handshake(self, transport: asyncio.Transport) -> None:
        """Begin the TLS handshake of a connection, or close it: handshakes count as connections."""
        server = self._runner.server
        assert server is not None and self._context is not None
        self._renew_certificate()
        share = ConnectionShare(self._shares, _address_of(transport))
        if not share.fits or len(server.connections) + len(self._handshakes) >= self._max_connections:
            self._malformed.counters.add("slipstream_http_connections_refused_total")
            share.leave()
            transport.abort()
            return
        self._handshakes.begin(transport, self._context, share, self._connect)

    def _connect(self, share: ConnectionShare | None = None) -> HttpConnection:
        """Make what serves a connection."""
        server = self._runner.server
        assert server is not None
        is_refused = len(server.connections) >= self._max_connections
        if is_refused:
            self._malformed.counters.add("slipstream_http_connections_refused_total")
        return HttpConnection(
            server,
            malformed=self._malformed,
            keepalive_s=self._keepalive_s,
            shares=self._shares,
            share=share,
            write_stall_s=self._write_stall_s,
            is_refused=is_refused,
        )

    def _renew_certificate(self) -> None:
        """Serve a replaced certificate from this connection on. Files that do not fit change nothing."""
        if self._tls is None or self._context is None:
            return
        version = self._tls.version()
        if version is None or version == self._version:
            return
        self._version = version
        if not self._tls.may_replace():
            return
        try:
            self._context = server_context(self._tls)
        except OSError:  # a file was replaced meanwhile: the next connection reads again
            self._version = None


def _address_of(transport: asyncio.BaseTransport) -> str:
    name = transport.get_extra_info("peername")
    return name[0] if isinstance(name, tuple) else "localhost"


def _bound_unread(transport: asyncio.BaseTransport, stall_s: float) -> None:
    """Let the kernel end the connection when its client takes nothing for that time, and keep little for it.

    The keep-alive time-out alone does not: a transport that closes waits until its buffer is sent. The kernel
    would keep up to 4 MB that no client takes, and asyncio 512 KiB with TLS. An unread stream would look like
    one that is read.
    """
    if isinstance(transport, asyncio.WriteTransport):
        transport.set_write_buffer_limits(high=HTTP_UNWRITTEN_BYTES)
    connection = transport.get_extra_info("socket")
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1e3))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, HTTP_UNSENT_BYTES)


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """TLS with the certificate that gRPC uses. HTTP clients have API keys, and need no certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.load_cert_chain(files.certificate, files.key)
    context.set_alpn_protocols(["http/1.1"])
    return context


async def _expect_continue(
    handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    on_unexpected: OnUnexpected,
    request: web.BaseRequest,
) -> web.StreamResponse:
    """Handle a request, but for one with another expectation. aiohttp would write the header's value into
    its answer, and fails with 500 where that is no text. Raises UnknownExpectation."""
    if request.headers.get("Expect", "100-continue").lower() not in ("", "100-continue"):
        raise UnknownExpectation(on_unexpected(request))
    return await handle(request)


def _refusal(defect: HttpProcessingError) -> HttpRefusal:
    for kind, status, words in _REFUSALS:
        if isinstance(defect, kind):
            code = "expectation_failed" if kind is UnknownExpectation else "malformed_http"
            return HttpRefusal(status, words, code=code)
    return HttpRefusal(400, "the HTTP message is malformed", code="malformed_http")

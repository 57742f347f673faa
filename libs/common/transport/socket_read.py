"""The reading side of a socket transport: one peer with its connections, and one read from it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import select
import socket
import threading
from collections.abc import Sequence

from libs.common.checksum import memory_at
from libs.common.transport.base import Landed, PeerGone, ReadOp, TransferRefused, TransferTimeout
from libs.common.transport.socket_server import (
    MAGIC,
    REPLY,
    REQUEST,
    SERVED,
    TOKEN_BYTES,
    WELCOME,
    block_at_most,
    receive_exactly,
    receive_into,
)
from slipstream.rpc.names import once_resolved

PROGRESS_TIMEOUT_S = 2.0
READS_PER_PEER = 4
# Requests in flight; few enough for the socket buffers at both ends.
REQUESTS_AHEAD = 32


class SocketPeer:
    """One incarnation of a peer, with its idle connections. Used from reader threads and the loop."""

    def __init__(self, session_id: str, *, progress_timeout_s: float) -> None:
        try:
            address, token = session_id.split("/")
            host, port = address.rsplit(":", 1)
            self.address = (host, int(port))
            self.token = bytes.fromhex(token)
            valid = 0 < self.address[1] < 65536 and len(self.token) == TOKEN_BYTES
        except ValueError:
            valid = False
        if not valid:
            raise TransferRefused("not a session id of the socket transport")
        self._progress_timeout_s = progress_timeout_s
        self.slots = asyncio.Semaphore(READS_PER_PEER)
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._closed = False

    def idle(self) -> socket.socket | None:
        """An open idle connection, or None; closes idle connections that the peer has ended."""
        with self._lock:
            while self._idle:
                connection = self._idle.pop()
                if not _has_ended(connection):
                    return connection
                connection.close()
        return None

    async def connect(self) -> socket.socket:
        """A new connection, accepted by the peer, whose name is looked up each time, again and again while it
        does not resolve. Raises PeerGone or TransferTimeout."""
        loop = asyncio.get_running_loop()
        host, port = self.address
        connection: socket.socket | None = None
        try:
            async with asyncio.timeout(self._progress_timeout_s):
                found = await once_resolved(
                    f"{host}:{port}",
                    lambda: loop.getaddrinfo(host, port, type=socket.SOCK_STREAM),
                    what="KV of a peer",
                )
                family, kind, protocol, _, address = found[0]
                connection = socket.socket(family, kind, protocol)
                connection.setblocking(False)
                await loop.sock_connect(connection, address)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_sendall(connection, MAGIC + self.token)
                welcome = await loop.sock_recv(connection, len(WELCOME))
            if welcome != WELCOME:
                raise PeerGone(f"another incarnation answers at {host}:{port}")
            block_at_most(connection, self._progress_timeout_s)
        except BaseException as error:
            if connection is not None:
                connection.close()
            if isinstance(error, TimeoutError):
                raise TransferTimeout(f"the peer at {host}:{port} does not answer") from None
            if isinstance(error, OSError):
                raise PeerGone(f"the peer at {host}:{port} is gone: {error}") from None
            raise
        return connection

    def keep(self, connection: socket.socket) -> None:
        """Keep a connection with no request in flight for later reads."""
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close the idle connections; `keep` closes the others."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _has_ended(connection: socket.socket) -> bool:
    """Whether the peer has closed an idle connection, the only event that makes it readable."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


class SocketRead:
    """One read, which runs in a thread. `abort` from another thread ends it at once."""

    def __init__(
        self, peer: SocketPeer, reads: Sequence[ReadOp], landed: Landed | None, connection: socket.socket
    ) -> None:
        self._peer = peer
        self._reads = reads
        self._landed = landed
        self._lock = threading.Lock()
        self._connection: socket.socket | None = connection
        self._aborted = False
        self._unsent = iter(reads)
        self._not_asked: OSError | None = None

    def ask_first(self) -> None:
        """Send the first requests, which an idle connection accepts at once; `run` raises a failure."""
        assert self._connection is not None
        try:
            self._ask(self._connection, socket.MSG_DONTWAIT)
        except OSError as error:
            self._not_asked = error

    def run(self) -> None:
        """Receive all bytes, after `ask_first`. Raises TransferError."""
        host, port = self._peer.address
        connection = self._connection
        assert connection is not None
        try:
            try:
                self._receive_all(connection)
            except BaseException:
                with self._lock:  # `abort` must not use the descriptor, which may be reused after the close
                    self._connection = None
                    connection.close()
                raise
            with self._lock:
                self._connection = None
            self._peer.keep(connection)
        except (TimeoutError, BlockingIOError):
            raise TransferTimeout(f"the peer at {host}:{port} makes no progress") from None
        except OSError as error:
            if self._aborted:
                raise TransferTimeout(f"the read from {host}:{port} was stopped") from None
            raise PeerGone(f"the peer at {host}:{port} is gone: {error}") from None

    def abort(self) -> None:
        """End the read, and wake its thread from the socket."""
        with self._lock:
            self._aborted = True
            if self._connection is not None:
                with contextlib.suppress(OSError):
                    self._connection.shutdown(socket.SHUT_RDWR)

    def _ask(self, connection: socket.socket, flags: int = 0) -> None:
        wave = itertools.islice(self._unsent, REQUESTS_AHEAD)
        connection.sendall(b"".join(REQUEST.pack(op.remote_address, op.n_bytes) for op in wave), flags)

    def _receive_all(self, connection: socket.socket) -> None:
        if self._not_asked is not None:
            raise self._not_asked
        for index, op in enumerate(self._reads):
            if index and index % REQUESTS_AHEAD == 0:
                self._ask(connection)
            reply = receive_exactly(connection, REPLY.size)
            if reply is None:
                raise ConnectionResetError("connection ended")
            status, n_bytes = REPLY.unpack(reply)
            if status != SERVED or n_bytes != op.n_bytes:
                raise TransferRefused(f"the peer refused {op.n_bytes} bytes at {op.remote_address:#x}")
            if not receive_into(connection, memory_at(op.local_address, op.n_bytes)):
                raise ConnectionResetError("connection ended")
            if self._landed is not None:
                self._landed(op)  # the kernel receives further bytes during this call

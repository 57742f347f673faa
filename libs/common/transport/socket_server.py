"""The serving side of the socket transport: registered memory over TCP, for readers with the token.

    client: MAGIC token(16)            server: 1 byte, 1 = welcome
    client: address u64, n_bytes u64   server: status u64 (0 = refused), n_bytes u64, 48 zeros, the bytes

The zeros keep the alignment of the bytes to cache lines, which makes the kernel's copies fast. Numbers are
little-endian. Any number of requests may be in flight on a connection; their answers come in order. Each
connection has a thread, and blocking calls release the interpreter lock while the kernel copies.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from libs.common.checksum import memory_at
from libs.common.transport.base import RegionTable, TransferRefused

log = logging.getLogger(__name__)

MAGIC = b"slipkv2\n"
TOKEN_BYTES = 16
WELCOME = b"\x01"
REQUEST = struct.Struct("<QQ")
REPLY = struct.Struct("<QQ48x")
SERVED, REFUSED = 1, 0
HELLO_TIMEOUT_S = 5.0
# The server closes the connection of a reader that receives nothing for this long.
SEND_TIMEOUT_S = 10.0
MAX_CONNECTIONS = 256
# Connections that have not shown the token yet; one more ends the oldest.
MAX_UNKNOWN = 64
REQUESTS_AT_ONCE = 32
ACCEPT_PAUSE_S = 0.1


class RegionServer:
    """Serves reads of `regions` until closed."""

    def __init__(self, bind: str, regions: RegionTable) -> None:
        """`bind`: HOST:PORT to listen on. Raises TransferRefused."""
        self._regions = regions
        self._listener = listen_at(bind)
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._unknown: dict[socket.socket, None] = {}  # those without the token, oldest first
        self._closed = False
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """Stop serving; returns when all threads that read the regions have ended."""
        with self._lock:
            self._closed = True
            connections = dict(self._connections)
        _shut(self._listener)
        self._listener.close()
        self._acceptor.join()
        for connection in connections:
            _shut(connection)
        for thread in connections.values():
            thread.join()

    def _accept(self) -> None:
        for connection in accepted(self._listener, self.port, lambda: self._closed):
            with self._lock:
                if self._closed or len(self._connections) - len(self._unknown) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                if len(self._unknown) >= MAX_UNKNOWN:
                    oldest = next(iter(self._unknown))
                    del self._unknown[oldest]
                    _shut(oldest)
                self._unknown[connection] = None
                thread = threading.Thread(
                    target=self._serve, args=(connection,), name="kv-serve", daemon=True
                )
                self._connections[connection] = thread
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._welcome(connection):
                with self._lock:
                    self._unknown.pop(connection, None)
                while self._answer(connection):
                    pass
        except OSError as error:
            log.debug("reader left: %s", error)
        finally:
            with self._lock:
                del self._connections[connection]
                self._unknown.pop(connection, None)
            connection.close()

    def _welcome(self, connection: socket.socket) -> bool:
        connection.settimeout(HELLO_TIMEOUT_S)
        hello = receive_exactly(connection, len(MAGIC) + TOKEN_BYTES)
        if hello is None or not hmac.compare_digest(hello, MAGIC + self.token):
            return False
        connection.sendall(WELCOME)
        block_at_most(connection, SEND_TIMEOUT_S, receiving=False)
        return True

    def _answer(self, connection: socket.socket) -> bool:
        """Answer all arrived requests with one send, as each wait for the interpreter lock may be long."""
        requests = connection.recv(REQUEST.size * REQUESTS_AT_ONCE)
        if not requests:
            return False
        if cut := len(requests) % REQUEST.size:
            rest = receive_exactly(connection, REQUEST.size - cut)
            if rest is None:
                return False
            requests += rest
        pieces: list[memoryview] = []
        for address, n_bytes in REQUEST.iter_unpack(requests):
            if self._regions.contains(address, n_bytes):
                pieces += memoryview(REPLY.pack(SERVED, n_bytes)), memory_at(address, n_bytes)
            else:
                log.warning("refused a read of %d bytes outside registered memory", n_bytes)
                pieces.append(memoryview(REPLY.pack(REFUSED, 0)))
        send_all(connection, pieces)
        return True


def listen_at(bind: str) -> socket.socket:
    """A listening socket at HOST:PORT; port 0 = any free one. Raises TransferRefused."""
    host, _, port = bind.rpartition(":")
    try:
        return socket.create_server((host, int(port)), backlog=64)
    except OSError as error:
        raise TransferRefused(f"the KV transport cannot listen on {bind}: {error}") from None


def accepted(listener: socket.socket, port: int, is_closed: Callable[[], bool]) -> Iterator[socket.socket]:
    """The connections to a socket that listens at `port`. A failure ends it only where `is_closed`."""
    is_failing = False
    while True:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            if is_closed():
                return
            if not is_failing:
                log.warning("the KV port %d accepts no connection now: %s", port, error)
            is_failing = True
            time.sleep(ACCEPT_PAUSE_S)  # the process may have a descriptor left by then
            continue
        is_failing = False
        yield connection


def receive_exactly(connection: socket.socket, n_bytes: int) -> bytes | None:
    """Receive `n_bytes`, or None if the connection ended before."""
    received = bytearray(n_bytes)
    return bytes(received) if receive_into(connection, memoryview(received)) else None


def receive_into(connection: socket.socket, destination: memoryview) -> bool:
    """Fill `destination`. Returns False if the connection ended before."""
    while destination:
        got = connection.recv_into(destination, 0, socket.MSG_WAITALL)
        if got == 0:
            return False
        destination = destination[got:]
    return True


def send_all(connection: socket.socket, pieces: list[memoryview]) -> None:
    """Send the pieces, which empties the list. Raises BlockingIOError when the reader receives nothing."""
    while pieces:
        sent = connection.sendmsg(pieces)
        whole = 0
        while whole < len(pieces) and sent >= len(pieces[whole]):
            sent -= len(pieces[whole])
            whole += 1
        del pieces[:whole]
        if sent:
            pieces[0] = pieces[0][sent:]


def block_at_most(connection: socket.socket, timeout_s: float, *, receiving: bool = True) -> None:
    """Make calls block, and end with BlockingIOError when no byte moved for `timeout_s`.

    The kernel's time-outs are cheaper than Python's, which poll before each call and return partial data.
    """
    connection.settimeout(None)
    whole_s, part_s = divmod(timeout_s, 1)
    limit = struct.pack("@ll", int(whole_s), int(part_s * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    if receiving:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in it

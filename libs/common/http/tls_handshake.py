"""The TLS handshake of an HTTP connection, bounded before it costs memory.

asyncio counts no connection during its handshake, and gives each one a buffer of 256 KiB to read with.
"""

from __future__ import annotations

import asyncio
import ssl
import traceback
from asyncio import sslproto
from collections.abc import Callable

from libs.common.connection_shares import ConnectionShare
from libs.common.http.chunked_body import READ_BYTES
from libs.common.service_bounds import GRPC_HANDSHAKE_S

MakeConnection = Callable[[ConnectionShare], asyncio.Protocol]


def read_in_small_pieces() -> None:
    """Let connections with TLS that this process opens from now on have small buffers to read with.

    With asyncio's 256 KiB a port takes 300 KiB a connection.
    """
    sslproto.SSLProtocol.max_size = READ_BYTES


class TlsHandshakes:
    """The handshakes of a port that are under way."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def begin(
        self,
        transport: asyncio.Transport,
        context: ssl.SSLContext,
        share: ConnectionShare,
        make: MakeConnection,
    ) -> None:
        """Do the handshake of a new connection, and then let what `make` returns serve it.

        `share` counts the connection; it is given back here where the handshake fails.
        """
        task = asyncio.get_running_loop().create_task(_handshake(transport, context, share, make))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def cancel(self) -> None:
        """End all of them."""
        for task in self._running:
            task.cancel()


class Accepted(asyncio.Protocol):
    """A new connection, before its handshake."""

    def __init__(self, begin: Callable[[asyncio.Transport], None]) -> None:
        self._begin = begin

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake, or close."""
        assert isinstance(transport, asyncio.Transport)
        self._begin(transport)


class _EarlyData(asyncio.Protocol):
    """Keeps what arrives together with the end of the handshake."""

    def __init__(self) -> None:
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data


async def _handshake(
    transport: asyncio.Transport, context: ssl.SSLContext, share: ConnectionShare, make: MakeConnection
) -> None:
    early = _EarlyData()
    try:
        secured = await asyncio.get_running_loop().start_tls(
            transport, early, context, server_side=True, ssl_handshake_timeout=GRPC_HANDSHAKE_S
        )
    except OSError as error:  # also what the TLS library refuses, and a time-out
        share.leave()
        # The frames of `start_tls` hold the future that holds the error, and 80 KiB of TLS. That cycle would
        # stay until the garbage collector runs.
        traceback.clear_frames(error.__traceback__)
        return
    except asyncio.CancelledError:
        share.leave()
        raise
    if secured is None or secured.is_closing():
        share.leave()
        return
    connection = make(share)
    secured.set_protocol(connection)
    connection.connection_made(secured)
    if early.data:
        connection.data_received(early.data)

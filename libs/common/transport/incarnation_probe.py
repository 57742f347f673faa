"""A small listener that names the incarnation of a process.

Mooncake's first contact with a stopped process blocks for a minute, and an address alone does not distinguish
a restarted process from its predecessor. So a reader connects to the probe first. The probe sends the nonce
that is part of the session id, and a note with the ports of the peer's engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from dataclasses import dataclass

from libs.common.transport.base import PeerGone, TransferTimeout
from libs.common.transport.socket_server import accepted, listen_at
from slipstream.rpc.names import once_resolved

NONCE_BYTES = 16
GREET_TIMEOUT_S = 1.0
MAX_NOTE_BYTES = 64


@dataclass(frozen=True, slots=True)
class ProbeAddress:
    """Where a probe listens and the nonce it sends."""

    host: str
    port: int
    nonce: bytes


class IncarnationProbe:
    """Answers every connection with the nonce, from one thread, until closed."""

    def __init__(self, bind: str, *, note: bytes = b"") -> None:
        """`bind`: HOST:PORT to listen on. `note`: at most MAX_NOTE_BYTES."""
        self._listener = listen_at(bind)
        self.port: int = self._listener.getsockname()[1]
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._note = note
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="kv-probe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        for connection in accepted(self._listener, self.port, lambda: self._closed):
            # This cannot block: so few bytes always fit into a new socket's buffer.
            with connection, contextlib.suppress(OSError):
                connection.sendall(self.nonce + self._note)


async def greet(address: ProbeAddress, *, timeout_s: float = GREET_TIMEOUT_S) -> bytes:
    """Connect to a probe and return its note. Raises PeerGone or TransferTimeout."""
    where = f"{address.host}:{address.port}"
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await once_resolved(
                where, lambda: asyncio.open_connection(address.host, address.port), what="KV of a peer"
            )
            nonce = await reader.readexactly(NONCE_BYTES)
            note = b""
            while len(note) < MAX_NOTE_BYTES and (more := await reader.read(MAX_NOTE_BYTES - len(note))):
                note += more
    except TimeoutError:
        raise TransferTimeout(f"the peer at {where} does not answer") from None
    except (OSError, asyncio.IncompleteReadError) as error:
        raise PeerGone(f"the peer at {where} is gone: {error}") from None
    finally:
        if writer is not None:
            writer.transport.abort()
    if nonce != address.nonce:
        raise PeerGone(f"another incarnation answers at {where}")
    return note

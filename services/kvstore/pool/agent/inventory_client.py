"""All that the pool holds, from the HTTP face of its master. Runs in the pool agent's process.

Mooncake's client has no such call, and publishes no events in this build. The list of names costs no lease,
which every question after a value does.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from services.kvstore.pool.inventory import MAX_CONTENTS_BLOCKS
from services.kvstore.pool.value import key_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

TIMEOUT_S = 5.0
# Names are 44 bytes each.
MAX_LIST_BYTES = 256 * MAX_CONTENTS_BLOCKS
READ_BYTES = 1 << 20
# So that an answer fits a line.
MAX_CHANGES = 16_384

Fetch = Callable[[str, str], str]


class _Answer(io.RawIOBase):
    """What a socket receives until the time is over, however it is cut: a socket's own time-out is for each
    piece, and one that drips would never meet it."""

    def __init__(self, peer: socket.socket, file: io.IOBase, give_up_at_s: float) -> None:
        """`file`: of the socket, which stays open as long as that is."""
        self._peer = peer
        self._file = file
        self._give_up_at_s = give_up_at_s

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Buffer) -> int:
        left_s = self._give_up_at_s - time.monotonic()
        if left_s <= 0:
            raise OSError(f"it is still answering after {TIMEOUT_S} s")
        self._peer.settimeout(left_s)
        return self._peer.recv_into(buffer)


class _Connection(http.client.HTTPConnection):
    """One exchange, which ends in time: status line, headers and body together."""

    def __init__(self, address: str) -> None:
        super().__init__(address, timeout=TIMEOUT_S)
        self._give_up_at_s = time.monotonic() + TIMEOUT_S
        self.response_class = self._response  # type: ignore[assignment]

    def _response(self, peer: socket.socket, *arguments: Any, **named: Any) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(peer, *arguments, **named)
        response.fp = io.BufferedReader(_Answer(peer, response.fp, self._give_up_at_s))
        return response


def fetch(address: str, path: str) -> str:
    """The body of a GET at HOST:PORT. Raises OSError; ends within TIMEOUT_S of the connection."""
    connection = _Connection(address)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = bytearray()
        while len(body) <= MAX_LIST_BYTES and (piece := response.read1(READ_BYTES)):
            body += piece
    except http.client.HTTPException as error:
        raise OSError(f"{address} does not speak HTTP: {error!r}") from None
    finally:
        connection.close()
    # http.client takes an answer that is cut off for a whole one, and what is missing would count as gone.
    whole = response.chunked or response.length == 0
    if response.status != http.client.OK or not whole or len(body) > MAX_LIST_BYTES:
        raise OSError(f"{address}{path} answers {response.status} with {len(body)} bytes")
    return body.decode("ascii", "replace")


class InventoryClient:
    """Remembers what it told last."""

    def __init__(self, addresses: Sequence[str], *, fetch: Fetch = fetch) -> None:
        """`addresses`: HOST:PORT of all masters; the one that leads is asked."""
        self._addresses = list(addresses)
        self._fetch = fetch
        self._told: set[bytes] = set()

    def changes(self, *, whole: bool) -> tuple[list[bytes], list[bytes], bool]:
        """What is new and what is gone since the last time, or all for `whole`; at most MAX_CHANGES, and
        whether there is more. Raises OSError when no master lists its values."""
        names = self._ask("/get_all_keys").split()
        if whole:
            self._told = set()
        held = {key for name in names if (key := key_of(name)) is not None}
        if len(held) > MAX_CONTENTS_BLOCKS:  # always the same ones
            held = set(sorted(held)[:MAX_CONTENTS_BLOCKS])
        gone = list(islice(self._told - held, MAX_CHANGES))
        new = list(islice(held - self._told, MAX_CHANGES - len(gone)))
        self._told.difference_update(gone)
        self._told.update(new)
        return new, gone, self._told != held

    def segments(self) -> list[str]:
        """The names of the segments of all living nodes that contribute one. Raises OSError."""
        return sorted(set(self._ask("/get_all_segments").split()))

    def _ask(self, path: str) -> str:
        """What the master that leads says."""
        problems = []
        for address in self._addresses:
            try:
                if self._fetch(address, "/role").strip() == "leader":
                    self._addresses.sort(key=lambda each: each != address)  # the first one next time
                    return self._fetch(address, path)
                problems.append(f"{address} does not lead")
            except OSError as error:
                problems.append(f"{address}: {error}")
        raise OSError("; ".join(problems) or "no master's HTTP face is known")

"""The pool's list of values, from the HTTP server of its master. Runs in the pool agent's process.

Mooncake's client has no such call, and this build publishes no events. Listing names renews no lease, unlike
a lookup of a value.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from services.kvstore.pool.inventory import MAX_INVENTORY_BLOCKS
from services.kvstore.pool.value import key_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

TIMEOUT_S = 5.0
# Names are 44 bytes each.
MAX_LIST_BYTES = 256 * MAX_INVENTORY_BLOCKS
READ_BYTES = 1 << 20
# Bound that lets an answer fit one protocol line.
MAX_CHANGES = 16_384

Fetch = Callable[[str, str], str]


class _Answer(io.RawIOBase):
    """A socket's input until a deadline.

    A socket's own time-out applies to each piece, so a server that sends single bytes would never meet it.
    """

    def __init__(self, peer: socket.socket, file: io.IOBase, deadline_s: float) -> None:
        """`file`: the response's file; it keeps the socket open until `close`."""
        self._peer = peer
        self._file = file
        self._give_up_at_s = deadline_s

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


class _MasterConnection(http.client.HTTPConnection):
    """One exchange within TIMEOUT_S: status line, headers and body together."""

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
    connection = _MasterConnection(address)
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
    # http.client accepts a truncated answer as complete, and the missing names would count as removed.
    whole = response.chunked or response.length == 0
    if response.status != http.client.OK or not whole or len(body) > MAX_LIST_BYTES:
        raise OSError(f"{address}{path} answers {response.status} with {len(body)} bytes")
    return body.decode("ascii", "replace")


class InventoryClient:
    """Lists the pool's blocks as differences to what it reported before."""

    def __init__(self, addresses: Sequence[str], *, fetch: Fetch = fetch) -> None:
        """`addresses`: HOST:PORT of all masters; the leader is asked."""
        self._addresses = list(addresses)
        self._fetch = fetch
        self._reported: set[bytes] = set()

    def changes(self, *, whole: bool) -> tuple[list[bytes], list[bytes], bool]:
        """New and removed blocks since the last call, or all blocks for `whole`; at most MAX_CHANGES.

        The third value says whether there are more. Raises OSError when no master lists its values.
        """
        names = self._ask("/get_all_keys").split()
        if whole:
            self._reported = set()
        held = {key for name in names if (key := key_of(name)) is not None}
        if len(held) > MAX_INVENTORY_BLOCKS:  # a stable choice
            held = set(sorted(held)[:MAX_INVENTORY_BLOCKS])
        gone = list(islice(self._reported - held, MAX_CHANGES))
        new = list(islice(held - self._reported, MAX_CHANGES - len(gone)))
        self._reported.difference_update(gone)
        self._reported.update(new)
        return new, gone, self._reported != held

    def segments(self) -> list[str]:
        """Segment names of all living nodes that contribute one. Raises OSError."""
        return sorted(set(self._ask("/get_all_segments").split()))

    def _ask(self, path: str) -> str:
        """The leader's answer to a GET. Raises OSError when no master leads."""
        problems = []
        for address in self._addresses:
            try:
                if self._fetch(address, "/role").strip() == "leader":
                    self._addresses.sort(key=lambda each: each != address)  # asked first next time
                    return self._fetch(address, path)
                problems.append(f"{address} does not lead")
            except OSError as error:
                problems.append(f"{address}: {error}")
        raise OSError("; ".join(problems) or "no HTTP endpoint of a master is known")

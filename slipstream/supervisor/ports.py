"""Loopback ports for the processes of a local cluster."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection
from contextlib import ExitStack

from libs.common.errors import FailedPrecondition

# Below the range that Linux takes ports of outgoing connections from, and apart from 12300-14300 and
# 15000-17000, where Mooncake's transfer engine listens.
FIRST_PORT, LAST_PORT = 20_000, 29_999


def free_ports(count: int, *, rng: random.Random, taken: Collection[int] = ()) -> list[int]:
    """`count` different loopback ports that nobody listens on, none of them in `taken`."""
    found: list[int] = []
    with ExitStack() as held:
        for port in rng.sample(range(FIRST_PORT, LAST_PORT + 1), LAST_PORT - FIRST_PORT + 1):
            if len(found) == count:
                break
            # Held until all are found, so that two clusters starting at once rarely agree on one.
            probe = held.enter_context(socket.socket())
            if port not in taken and _bind(probe, port):
                found.append(port)
    if len(found) < count:
        raise FailedPrecondition(f"no {count} free loopback ports between {FIRST_PORT} and {LAST_PORT}")
    return found


def require_free(address: str) -> None:
    """Nothing, or `FailedPrecondition` naming an address that is none, or is in use."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise FailedPrecondition(f"{address!r} is not host:port with a port from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise FailedPrecondition(f"{address} is in use by another process") from None
            raise FailedPrecondition(f"cannot listen on {address}: {error.strerror}") from None


def _bind(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("127.0.0.1", port))
        probe.listen()
        return True
    except OSError:
        return False

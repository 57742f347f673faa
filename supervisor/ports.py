"""Loopback ports for the processes of a local cluster."""

from __future__ import annotations

import collections
import errno
import os
import random
import socket
from collections.abc import Collection
from contextlib import ExitStack

from slipstream.errors import FailedPrecondition, InvalidArgument

# Below the range that Linux takes ports of outgoing connections from, and apart from 12300-14300 and
# 15000-17000, where Mooncake's transfer engine listens.
FIRST_PORT, LAST_PORT = 20_000, 29_999


# A process claims ports by blocks, each by an abstract socket name (Linux). Seconds pass between the choice
# of a port and its use, or its reuse after a kill. Claims of a process's last clusters stay open. The kernel
# frees the names at the process's end; like ports, they belong to one network namespace.
_BLOCK_PORTS = 32
_MAX_CLAIMS = 64
_claims: collections.deque[socket.socket] = collections.deque()


def free_ports(count: int, *, rng: random.Random, taken: Collection[int] = ()) -> list[int]:
    """`count` different unused loopback ports outside `taken`.

    None is among the ports that processes of this user have claimed recently.
    """
    ports = range(FIRST_PORT, LAST_PORT + 1)
    if count > len(ports):
        raise _none_left(count)
    found: list[int] = []
    with ExitStack() as held:
        for block in dict.fromkeys(port // _BLOCK_PORTS for port in rng.sample(ports, len(ports))):
            if len(found) == count:
                break
            if not _claim(block):
                continue
            for port in range(block * _BLOCK_PORTS, (block + 1) * _BLOCK_PORTS):
                probe = held.enter_context(socket.socket())
                if len(found) < count and port in ports and port not in taken and _bind(probe, port):
                    found.append(port)
    if len(found) < count:
        raise _none_left(count)
    return found


def _none_left(count: int) -> FailedPrecondition:
    return FailedPrecondition(f"no {count} free loopback ports between {FIRST_PORT} and {LAST_PORT}")


def _claim(block: int) -> bool:
    """Claim the block for this process; True where the system has no abstract socket names."""
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0slipstream-ports-{os.getuid()}-{block}")
    except OSError as error:
        claim.close()
        return error.errno != errno.EADDRINUSE
    if len(_claims) == _MAX_CLAIMS:
        _claims.popleft().close()
    _claims.append(claim)
    return True


def require_free(address: str, *, flag: str) -> None:
    """Nothing, or `InvalidArgument` for `flag`: an address that is none, or is in use."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidArgument(flag, f"{address!r} is not host:port with a port from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise InvalidArgument(
                    flag, f"{address} is in use by another process; 'any' takes a free port"
                ) from None
            raise InvalidArgument(flag, f"cannot listen on {address}: {error.strerror}") from None


def _bind(probe: socket.socket, port: int) -> bool:
    try:
        probe.bind(("127.0.0.1", port))
        probe.listen()
        return True
    except OSError:
        return False

"""The TCP connections that gRPC has accepted on a port of this process, by the kernel's table of files.

grpc.aio shows no connections and ends none. Their sockets are files of the process, so it sees who is
connected, and shuts a connection down as its client could. gRPC then closes it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Collection, Iterator
from urllib.parse import unquote

from slipstream.rpc.hosts import host_of, plain_host

_FILES = "/proc/self/fd"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)

# Host and port of a client.
Address = tuple[str, int]


def n_files() -> int:
    """The number of files that the process has open: it has no more connections. 0 where none can be seen."""
    try:
        return len(os.listdir(_FILES))
    except OSError:
        return 0


def clients_of(port: int) -> list[Address]:
    """The clients that are connected to a port of this process."""
    return [address for _, address in _accepted(port)]


def shut_down(port: int, clients: Collection[Address]) -> None:
    """End these connections."""
    for accepted, address in _accepted(port):
        if address in clients:
            with contextlib.suppress(OSError):  # closed meanwhile
                accepted.shutdown(socket.SHUT_RDWR)


def address_of(peer: str) -> Address:
    """The address in gRPC's name of a peer: ipv4:127.0.0.1:50000, ipv6:%5B::1%5D:50000."""
    endpoint = unquote(peer.partition(":")[2])
    _, _, port = endpoint.rpartition(":")
    return _unmapped(host_of(endpoint)), int(port) if port.isdecimal() else 0


def _accepted(port: int) -> Iterator[tuple[socket.socket, Address]]:
    """The sockets, each valid until the next one is taken. They stay gRPC's.

    A socket is used by its number, without a copy: gRPC's poller relies on the only close of a file.
    """
    for name in os.listdir(_FILES):
        try:
            accepted = socket.socket(fileno=int(name))
        except OSError:  # no socket, or closed meanwhile
            continue
        try:
            if accepted.family in _FAMILIES and accepted.getsockname()[1] == port:
                host, client_port = accepted.getpeername()[:2]
                yield accepted, (_unmapped(host), client_port)
        except OSError:  # the listening socket, or closed meanwhile
            continue
        finally:
            accepted.detach()


def _unmapped(host: str) -> str:
    """The IPv4 address that a socket for both protocols shows as one of IPv6."""
    host = plain_host(host)
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
    return host

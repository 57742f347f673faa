"""The TCP connections that gRPC has accepted on a port of this process, by the kernel's table of files.

grpc.aio shows no connections and ends none. Their sockets are files of the process, so it sees who is
connected, and shuts a connection down as its client could. gRPC then closes it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import ipaddress
import os
import resource
import socket
from collections.abc import Collection, Iterator, Sequence
from urllib.parse import unquote

from slipstream.rpc.hosts import host_of, plain_host

_FILES = "/proc/self/fd"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)

# Host and port of a client.
Address = tuple[str, int]


def n_files() -> int:
    """The number of files that the process has open: it has no more connections. 0 where none can be seen."""
    return len(_numbers())


def clients_of(port: int) -> list[Address]:
    """The clients that are connected to a port of this process."""
    return [address for _, address in _accepted(port)]


def shut_down(port: int, clients: Collection[Address]) -> None:
    """End these connections."""
    for accepted, address in _accepted(port):
        if address in clients:
            with contextlib.suppress(OSError):  # closed meanwhile
                accepted.shutdown(socket.SHUT_RDWR)


@functools.lru_cache(4096)
def address_of(peer: str) -> Address:
    """The address in gRPC's name of a peer: ipv4:127.0.0.1:50000, ipv6:%5B::1%5D:50000."""
    endpoint = unquote(peer.partition(":")[2])
    _, _, port = endpoint.rpartition(":")
    return _unmapped(host_of(endpoint)), int(port) if port.isdecimal() else 0


def _accepted(port: int) -> Iterator[tuple[socket.socket, Address]]:
    """The sockets, each valid until the next one is taken. They stay gRPC's.

    A socket is used by its number, without a copy: gRPC's poller relies on the only close of a file.
    """
    for number in _numbers():
        try:
            accepted = socket.socket(fileno=number)
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


def _numbers() -> Sequence[int]:
    """The numbers of all open files; none where they cannot be seen.

    A listing needs a number, too. Where it finds none, every number below the limit is one of an open file.
    """
    try:
        return [int(name) for name in os.listdir(_FILES)]
    except OSError as error:
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) if error.errno == errno.EMFILE else ()


def _unmapped(host: str) -> str:
    """The host in one form: gRPC names the zone of a link-local address, which Python leaves out.

    A socket for both protocols shows an IPv4 address as one of IPv6.
    """
    host = plain_host(host.partition("%")[0])
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
    return host

"""The TCP connections that gRPC has accepted at an address of this process, by the kernel's table of files.

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
import threading
from collections.abc import Collection, Iterator, Sequence
from urllib.parse import unquote

from slipstream.rpc.hosts import host_of, is_wildcard, plain_host

_FILES = "/proc/self/fd"
_FAMILIES = (socket.AF_INET, socket.AF_INET6)

# Host and port of a client.
Address = tuple[str, int]


def n_files() -> int:
    """The number of files that the process has open: it has no more connections. 0 where none can be seen."""
    return len(_numbers())


class AcceptedSockets:
    """The connections that gRPC accepted at one address, which other sockets may share by their port.

    A thread at a time calls it; `close` may come from another one amid a call.
    """

    def __init__(self, listen: str) -> None:
        """`listen` is HOST:PORT, as bound. Raises OSError for an unknown name, or without a free file."""
        self._hosts, self._port = _hosts_of(listen), int(listen.rpartition(":")[2])
        # They are opened in advance: a copy needs a number, and an attack may leave none.
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._copy = os.dup(self._nothing)
        # After `close` other files may have the numbers, and a copy would replace them.
        self._lock = threading.Lock()
        self._is_closed = False

    def close(self) -> None:
        """Close what was opened in advance. A call that still runs ends no more connections."""
        with self._lock:
            self._is_closed = True
            os.close(self._copy)
            os.close(self._nothing)

    def clients(self) -> list[Address]:
        """The addresses of the connected clients."""
        return [client for number in _numbers() if (client := self._client_of(number)) is not None]

    def shut_down(self, clients: Collection[Address]) -> None:
        """End the connections of these clients."""
        for number in _numbers():
            if self._client_of(number) in clients:
                with self._lock:
                    if self._is_closed:
                        return
                    self._end(number, clients)

    def _end(self, number: int, clients: Collection[Address]) -> None:
        """End the connection with this number, unless it closed and another file took the number.

        The copy stays one socket between the look and the act. It lives as short as possible, because the
        poller of gRPC relies on the last close of a file.
        """
        try:
            os.dup2(number, self._copy, inheritable=False)
            if self._client_of(self._copy) in clients:
                with _socket_at(self._copy) as accepted:
                    accepted.shutdown(socket.SHUT_RDWR)
        except OSError:  # closed meanwhile
            return
        finally:
            os.dup2(self._nothing, self._copy, inheritable=False)

    def _client_of(self, number: int) -> Address | None:
        """The client of the connection with this number; None for any other file."""
        try:
            with _socket_at(number) as accepted:
                if accepted.family not in _FAMILIES:
                    return None
                host, port = accepted.getsockname()[:2]
                if port != self._port or (self._hosts is not None and _unmapped(host) not in self._hosts):
                    return None
                client, client_port = accepted.getpeername()[:2]
                return _unmapped(client), client_port
        except OSError:  # no socket, the listening one, or closed meanwhile
            return None


@functools.lru_cache(4096)
def address_of(peer: str) -> Address:
    """The address in gRPC's name of a peer: ipv4:127.0.0.1:50000, ipv6:%5B::1%5D:50000."""
    endpoint = unquote(peer.partition(":")[2])
    _, _, port = endpoint.rpartition(":")
    return _unmapped(host_of(endpoint)), int(port) if port.isdecimal() else 0


@contextlib.contextmanager
def _socket_at(number: int) -> Iterator[socket.socket]:
    """The socket with this number, which stays open: it is gRPC's. Raises OSError."""
    found = socket.socket(fileno=number)
    try:
        yield found
    finally:
        found.detach()


def _hosts_of(listen: str) -> frozenset[str] | None:
    """The local addresses of connections to HOST:PORT; None for any, as a wildcard has."""
    host = host_of(listen)
    if not host or is_wildcard(listen):
        return None
    return frozenset(_unmapped(str(found[4][0])) for found in socket.getaddrinfo(host, None))


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

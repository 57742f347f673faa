"""Listening sockets of HTTP ports."""

from __future__ import annotations

import socket

from slipstream.errors import Unavailable

_BACKLOG = 1024


def endpoint_of(listening: socket.socket) -> str:
    """host:port of a socket, with the port that was bound."""
    host, port = listening.getsockname()[:2]
    return f"{host}:{port}"


def listen_tcp(endpoint: str, *, share_port: bool = False, accept: bool = True) -> socket.socket:
    """A listening socket. `share_port`: other processes may listen there too; without `accept` it only
    keeps the port for them. Raises Unavailable."""
    host, _, port = endpoint.rpartition(":")
    # asyncio sets TCP_NODELAY only on sockets with the protocol TCP; those of create_server have none.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if share_port:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listening.bind((host, int(port)))
        if accept:
            listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise Unavailable(f"cannot listen on {endpoint}: {error}") from error
    return listening

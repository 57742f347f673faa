"""The audience of a token: the endpoint that a caller dials, in one spelling. Pure.

A server accepts the tokens of its audiences: the endpoints by which others dial it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slipstream.rpc.hosts import is_wildcard, plain_host

_ENDPOINT = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]{1,253}):([0-9]{1,5})")
_MAX_PORT = 65535
# What a channel to these hosts reaches is this machine. One address for each, because another process may
# listen at the other loopback address of the same port.
_ADDRESSES = {"localhost": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def audience_of(endpoint: str) -> str:
    """The endpoint as tokens name it; "" for a text that is no "host:port", where no server is."""
    match = _ENDPOINT.fullmatch(endpoint.lower())
    if match is None or int(match[2]) > _MAX_PORT:
        return ""
    host, port = plain_host(match[1]), int(match[2])
    host = _ADDRESSES.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def server_audiences(bound: str, names: Iterable[str] = ()) -> frozenset[str]:
    """The audiences of a server that is bound to one endpoint and dialled by further names.

    A wildcard address is the same on every machine. So it is an audience only for a server without a name:
    its callers are on this machine.
    """
    named = frozenset(audience_of(name) for name in names if not is_wildcard(name)) - {""}
    if is_wildcard(bound):
        return named or frozenset({audience_of(bound)})
    return named | ({audience_of(bound)} - {""})

"""Hosts of endpoints: which are this machine's, and which stand for all of its addresses. Pure."""

from __future__ import annotations

import ipaddress

_WILDCARDS = ("0.0.0.0", "::")


def host_of(endpoint: str) -> str:
    """The host of HOST:PORT, an IPv6 address without its brackets."""
    return endpoint.rpartition(":")[0].strip("[]")


def address_of(text: str) -> tuple[str, int]:
    """The host, without brackets, and the port of HOST:PORT. Raises ValueError for any other text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"must be HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)


def plain_host(host: str) -> str:
    """The host without brackets, an address in its shortest form."""
    host = host.strip("[]")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host


def is_wildcard(endpoint: str) -> bool:
    """Whether HOST:PORT stands for all addresses of the machine, so that no other machine can dial it."""
    return plain_host(host_of(endpoint)) in _WILDCARDS


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach the host, an address or a name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"

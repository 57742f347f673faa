"""The advertised address of a port, for others to dial, where it is not the bound one. Pure."""

from __future__ import annotations

from slipstream.rpc.hosts import is_wildcard


def advertised_endpoint(bound: str, advertise: str) -> str:
    """The address to dial for the port bound at `bound`; port 0 of `advertise` is the bound one."""
    if not advertise:
        return bound
    host, _, port = advertise.rpartition(":")
    return advertise if int(port) else f"{host}:{bound.rpartition(':')[2]}"


def endpoint_beside(bound: str, advertised: str) -> str:
    """The address to dial for another port of a process: the host of `advertised` where `bound` has none.

    A port on one address, such as a loopback address, is announced as it is: only that address reaches it.
    """
    if not is_wildcard(bound):
        return bound
    return f"{advertised.rpartition(':')[0]}:{bound.rpartition(':')[2]}"

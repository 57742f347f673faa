"""The advertised address of a port, for others to dial, where it is not the bound one. Pure."""

from __future__ import annotations

from slipstream.rpc.hosts import is_wildcard


def advertised_endpoint(bound: str, advertise: str) -> str:
    """The address to dial for the port bound at `bound`; port 0 of `advertise` is the bound one."""
    if not advertise:
        return bound
    host, _, port = advertise.rpartition(":")
    return advertise if int(port) else f"{host}:{bound.rpartition(':')[2]}"


def endpoint_beside(bound: str, advertised: str, advertise: str = "") -> str:
    """The address to dial for another port of a process, bound at `bound`: `advertise` where that is given.

    Without it, the host of `advertised`, the process's gRPC address, where `bound` stands for all addresses.
    A port on one address, such as a loopback address, is announced as it is: only that address reaches it.
    """
    if advertise:
        return advertised_endpoint(bound, advertise)
    if not is_wildcard(bound):
        return bound
    return f"{advertised.rpartition(':')[0]}:{bound.rpartition(':')[2]}"

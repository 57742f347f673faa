"""Free loopback ports for tests. The supervisor's claims keep concurrent test processes apart."""

from __future__ import annotations

import random

from supervisor.ports import free_ports

_AT_ONCE = 32
_rest: list[int] = []


class OwnPorts(random.Random):
    """The generator of a cluster's ports, which no test seeds."""


def own_ports(count: int) -> list[int]:
    """`count` different ports without a listener."""
    while len(_rest) < count:
        _rest[:] = free_ports(max(_AT_ONCE, count), rng=OwnPorts())
    return [_rest.pop() for _ in range(count)]

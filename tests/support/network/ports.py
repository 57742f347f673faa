"""Loopback ports for tests, a few at a time. The supervisor's claims keep test processes apart."""

from __future__ import annotations

import random

from supervisor.ports import free_ports

_AT_ONCE = 32
_rest: list[int] = []


class OwnPorts(random.Random):
    """What a cluster chooses its ports with: not a generator that some test has seeded."""


def own_ports(count: int) -> list[int]:
    """`count` different ports that nobody listens on."""
    while len(_rest) < count:
        _rest[:] = free_ports(max(_AT_ONCE, count), rng=OwnPorts())
    return [_rest.pop() for _ in range(count)]

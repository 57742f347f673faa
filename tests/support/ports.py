"""Loopback ports that no other test takes, neither one of this process nor one that runs beside it.

Between the choice of a port and its use by a process that starts pass seconds on a busy machine, and a
process that is killed leaves its port for as long. So each test process (pytest-xdist) has ports of its own,
below those of outgoing connections, and hands them out in turn.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

from slipstream.supervisor.ports import free_ports

_SHARES = 4
_MOST_AT_ONCE = 64  # ports of one cluster


class OwnPorts(random.Random):
    """For `free_ports` and the supervisor: what it samples from are this process's ports, in turn."""

    _next = 0

    def sample(self, population: Sequence[Any], k: int, *, counts: Any = None) -> list[Any]:
        """All that are this process's, those last handed out at the end."""
        mine = [port for port in population if port % _SHARES == _share()]
        at = OwnPorts._next % len(mine)
        OwnPorts._next += _MOST_AT_ONCE
        return mine[at:] + mine[:at]


def own_ports(count: int) -> list[int]:
    """`count` different ports that nobody listens on."""
    assert count <= _MOST_AT_ONCE
    ports = free_ports(count, rng=OwnPorts())
    OwnPorts._next -= _MOST_AT_ONCE - count
    return ports


def _share() -> int:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    return int(worker.removeprefix("gw") or os.getpid()) % _SHARES

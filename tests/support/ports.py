"""Loopback ports that no other test takes, neither one of this process nor one that runs beside it.

Between the choice of a port and its use by a process that starts pass seconds on a busy machine, and a
process that is killed leaves its port for as long. So each test process claims blocks of ports by locks that
last as long as itself. All are below the ports of outgoing connections.
"""

from __future__ import annotations

import fcntl
import os
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from slipstream.supervisor.ports import FIRST_PORT, LAST_PORT, free_ports

_BLOCK_PORTS = 64  # more than one cluster needs
_N_BLOCKS = (LAST_PORT + 1 - FIRST_PORT) // _BLOCK_PORTS
_LOCKS = Path(tempfile.gettempdir()) / f"slipstream-test-ports-{os.getuid()}"
_claimed: list[tuple[list[int], TextIO]] = []
_rest: list[int] = []  # of a block that is handed out in small numbers


class OwnPorts(random.Random):
    """For the supervisor: what it samples from is a block that nobody else has."""

    def sample(self, population: Sequence[Any], k: int, *, counts: Any = None) -> list[Any]:
        """A fresh block; for want of one, the one that was claimed first."""
        return _claim()


def own_ports(count: int) -> list[int]:
    """`count` different ports that nobody listens on."""
    while len(_rest) < count:
        _rest[:] = free_ports(_BLOCK_PORTS // 2, rng=OwnPorts())
    return [_rest.pop() for _ in range(count)]


def _claim() -> list[int]:
    _LOCKS.mkdir(exist_ok=True)
    numbers = list(range(_N_BLOCKS))
    random.shuffle(numbers)
    for number in numbers:
        lock = (_LOCKS / str(number)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        first = FIRST_PORT + number * _BLOCK_PORTS
        _claimed.append((list(range(first, first + _BLOCK_PORTS)), lock))
        return _claimed[-1][0]
    _claimed.append(_claimed.pop(0))
    return _claimed[-1][0]

"""Whose turn it is to get a request that nobody holds anything of. Pure."""

from __future__ import annotations


class ColdRoundRobin:
    """Numbers the cold requests; a worker's turn is the number of the last one it got, 0 = none."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._count = 0

    def turn(self, worker: str) -> int:
        """When the worker last got one."""
        return self._turns.get(worker, 0)

    def placed(self, worker: str) -> None:
        """The worker gets one now."""
        self._count += 1
        self._turns[worker] = self._count

    def forget(self, worker: str) -> None:
        """The worker is gone. Idempotent."""
        self._turns.pop(worker, None)

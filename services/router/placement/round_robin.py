"""Round robin of cold requests (policy.py) over prefill workers. Pure."""

from __future__ import annotations


class ColdRoundRobin:
    """Numbers the cold requests. A worker has the number of its last one, 0 = none."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._count = 0

    def last_number(self, worker: str) -> int:
        """The number of the worker's last cold request."""
        return self._numbers.get(worker, 0)

    def placed(self, worker: str) -> None:
        """Give the worker the next number."""
        self._count += 1
        self._numbers[worker] = self._count

    def remove(self, worker: str) -> None:
        """Drop a departed worker. Idempotent."""
        self._numbers.pop(worker, None)

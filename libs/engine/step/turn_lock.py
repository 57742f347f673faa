"""A lock that threads get in the order of their requests, so that one loop of short gaps starves no other."""

from __future__ import annotations

import threading


class TurnLock:
    """A context manager. Each thread draws a number, and the lock calls the numbers in turn."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._drawn = 0
        self._called = 0

    def __enter__(self) -> None:
        with self._changed:
            number, self._drawn = self._drawn, self._drawn + 1
            while number != self._called:
                self._changed.wait()

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._called += 1
            self._changed.notify_all()

"""A lock that threads get in the order of their requests, so that one loop of short gaps starves no other."""

from __future__ import annotations

import threading


class TurnLock:
    """A context manager. The thread that waits next holds `_next`, which the last holder cannot pass."""

    def __init__(self) -> None:
        self._next = threading.Lock()
        self._held = threading.Lock()

    def __enter__(self) -> None:
        with self._next:
            self._held.acquire()

    def __exit__(self, *_: object) -> None:
        self._held.release()

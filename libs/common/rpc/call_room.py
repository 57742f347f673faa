"""A bound on the calls that run together. Pure."""

from __future__ import annotations

from slipstream.errors import Overloaded


class CallRoom:
    """A context manager around a call; entering raises Overloaded when `most` calls run."""

    def __init__(self, most: int) -> None:
        self.running = 0
        self._most = most

    def __enter__(self) -> None:
        if self.running >= self._most:
            raise Overloaded(f"{self._most} calls of this kind run already")
        self.running += 1

    def __exit__(self, *raised: object) -> None:
        self.running -= 1

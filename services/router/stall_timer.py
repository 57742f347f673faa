"""How long a client may leave what was written unread: one timer a call, however many writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class StallTimer:
    """Calls `on_stall` when a write takes longer than `limit_s`. Use: begin(); write; end(); ... close()."""

    def __init__(self, limit_s: float, on_stall: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._limit_s = limit_s
        self._on_stall = on_stall
        self._began_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A write begins."""
        self._began_s = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._limit_s, self._check)

    def end(self) -> None:
        """The write is done. The timer stays: moving it at every write would cost more than its check."""
        self._began_s = None

    def close(self) -> None:
        """No more writes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        self._timer = None
        if self._began_s is None:
            return
        until_s = self._began_s + self._limit_s
        if until_s <= self._loop.time():
            self._on_stall()
        else:
            self._timer = self._loop.call_at(until_s, self._check)

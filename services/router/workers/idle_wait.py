"""A wait for news that also ends when there was none for a while: what the shared streams' users wait in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

# Who waits for something that brought nothing for so long, up to twice, is told that it is `idle`.
IDLE_S = 0.1


class NewsWait:
    """One waiter. `wake`: there is news; `tick`, every IDLE_S: there may be none."""

    __slots__ = ("_future", "_loop", "_ticked")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """`loop`: the running one, which is a system call to ask for."""
        self._loop = loop
        self._future: asyncio.Future[None] | None = None
        self._ticked = False  # once since the wait began

    def wait(self) -> asyncio.Future[None]:
        """To be awaited: done after `wake`, or after two ticks."""
        self._future, self._ticked = self._loop.create_future(), False
        return self._future

    @property
    def waiting(self) -> bool:
        """Whether somebody waits."""
        return self._future is not None and not self._future.done()

    def heard(self) -> None:
        """Something came that the waiter need not wake up for."""
        self._ticked = False

    def wake(self) -> None:
        """Let the waiter go on, if there is one."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    def tick(self) -> None:
        """From the ticker."""
        if self._ticked:
            self.wake()
        self._ticked = True


class Ticker:
    """One timer for all waits of a stream: it costs less than one for each. Runs while there are any."""

    def __init__(self, waits: Callable[[], Iterable[NewsWait]]) -> None:
        self._waits = waits
        self._timer: asyncio.TimerHandle | None = None

    def run(self) -> None:
        """There is a wait. Idempotent."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._tick)

    def close(self) -> None:
        """No more ticks."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        self._timer = None
        for wait in self._waits():
            wait.tick()
            self.run()

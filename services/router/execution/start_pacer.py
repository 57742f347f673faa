"""Who does much work at once lets a few go on in each turn of the event loop, in order.

A burst of requests is otherwise worked on breadth first: all are encoded, then all are placed and sent, and
the first one waits for the last. In turns the first prefills run while later requests are encoded, and
first tokens that come meanwhile are handed on between two turns.
"""

from __future__ import annotations

import asyncio
import collections

# Some together, so that what they send to a worker travels in one message.
PER_TURN = 4


class StartPacer:
    """`await take()` before the work."""

    def __init__(self, *, per_turn: int = PER_TURN) -> None:
        self._per_turn = per_turn
        self._left = per_turn
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()
        self._armed = False

    async def take(self) -> None:
        """Return at once while this turn has room, else in a later turn."""
        if self._left and not self._waiting:
            self._left -= 1
            self._arm()
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._arm()
        await turn

    def _arm(self) -> None:
        if not self._armed:
            self._armed = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._armed, self._left = False, self._per_turn
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # else its task was cancelled
                turn.set_result(None)
                self._left -= 1
        if self._waiting or self._left < self._per_turn:
            self._arm()

"""Pins that have served their turn: they end with the reader's next pin of the same lender.

A call of its own for each would take as long as the pin, from the cores that the next blocks arrive on. Where
no pin follows soon, or the one that told of them fails, the call is made.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from libs.common.rpc.pin_names import MAX_RELEASED
from slipstream.v1 import kvstore_pb2

# For so long a pin may wait for the next one.
RIDE_AFTER_S = 0.01
# A pin is over by then.
TELL_S = 5.0


class PinReleases:
    """The pins of one worker that are to end, by lender. Event loop only."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, asyncio.Future[bool]]] = {}

    def offer(self, endpoint: str, lease_id: str) -> asyncio.Future[bool]:
        """From now on the next pin of the lender may end this one; `rode` must follow."""
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(endpoint, {})[lease_id] = told
        return told

    async def rode(self, endpoint: str, lease_id: str, told: asyncio.Future[bool]) -> bool:
        """Whether another pin of the lender ended this one meanwhile; else it is the caller's to end."""
        try:
            await asyncio.wait({told}, timeout=RIDE_AFTER_S)
        finally:
            waiting = self._waiting.get(endpoint, {})
            left = waiting.pop(lease_id, None) is not None
            if not waiting:
                self._waiting.pop(endpoint, None)
        if left:
            return False
        await asyncio.wait({told}, timeout=TELL_S)
        return told.done() and told.result()

    def board(self, endpoint: str, request: kvstore_pb2.PinRequest) -> Sequence[asyncio.Future[bool]]:
        """Have the request end pins that wait; what `arrived` is to be told with when it is over."""
        waiting = self._waiting.get(endpoint, {})
        riders = list(waiting)[:MAX_RELEASED]
        request.released.extend(riders)
        return [waiting.pop(lease_id) for lease_id in riders]


def arrived(riders: Sequence[asyncio.Future[bool]], pin: asyncio.Future[kvstore_pb2.PinResponse]) -> None:
    """The pin is over: of those that rode with it, so many have ended as the answer says."""
    answered = not pin.cancelled() and pin.exception() is None
    n_ended = pin.result().ended_pins if answered else 0
    for number, told in enumerate(riders):
        if not told.done():
            told.set_result(number < n_ended)

"""Releases that travel with the reader's next pin at the same lender.

A release sent alone costs as much as the pin, on the cores that the next blocks arrive on. It is sent alone
only where no pin follows soon, or where the pin that carried it fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from libs.common.rpc.pins.names import MAX_RELEASED
from slipstream.v1 import kvstore_pb2

# How long a release waits for the next pin.
WAIT_FOR_PIN_S = 0.01
# How long it waits for the answer to that pin; a pin is over by then.
WAIT_FOR_ANSWER_S = 5.0


class PinReleases:
    """The pins of one worker that are to end, by lender. Event loop only."""

    def __init__(self) -> None:
        self._waiting: dict[str, dict[str, asyncio.Future[bool]]] = {}

    def offer(self, endpoint: str, lease_id: str) -> asyncio.Future[bool]:
        """Let the next pin at the lender release this one; `was_carried` must follow."""
        carried: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(endpoint, {})[lease_id] = carried
        return carried

    async def was_carried(self, endpoint: str, lease_id: str, carried: asyncio.Future[bool]) -> bool:
        """Whether another pin at the lender released this one meanwhile; else the caller must."""
        try:
            await asyncio.wait({carried}, timeout=WAIT_FOR_PIN_S)
        finally:
            waiting = self._waiting.get(endpoint, {})
            left = waiting.pop(lease_id, None) is not None
            if not waiting:
                self._waiting.pop(endpoint, None)
        if left:
            return False
        await asyncio.wait({carried}, timeout=WAIT_FOR_ANSWER_S)
        return carried.done() and carried.result()

    def add_to(self, endpoint: str, request: kvstore_pb2.PinRequest) -> Sequence[asyncio.Future[bool]]:
        """Add waiting releases to the request. Pass the result to `on_pin_ended` when the pin is over."""
        waiting = self._waiting.get(endpoint, {})
        lease_ids = list(waiting)[:MAX_RELEASED]
        request.released.extend(lease_ids)
        return [waiting.pop(lease_id) for lease_id in lease_ids]


def on_pin_ended(
    carried_releases: Sequence[asyncio.Future[bool]], pin: asyncio.Future[kvstore_pb2.PinResponse]
) -> None:
    """The pin is over: the first `ended_pins` of the releases that it carried took effect."""
    answered = not pin.cancelled() and pin.exception() is None
    n_ended = pin.result().ended_pins if answered else 0
    for number, carried in enumerate(carried_releases):
        if not carried.done():
            carried.set_result(number < n_ended)

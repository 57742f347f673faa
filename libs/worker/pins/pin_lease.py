"""One pin of a restore, from its request to its release.

    pin = pins.begin(endpoint, request)
    try:
        pinned = await pin.answer          # raises SlipstreamError
        with pin.renewed(): ...            # read
    finally:
        pin.release()

The release runs in the background: the caller does not wait for it, and the lease ends the pin anyway.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

from libs.worker.pins.peers import Peers
from libs.worker.pins.pin_calls import PinCalls
from libs.worker.pins.pin_releases import PinReleases, on_pin_ended
from slipstream.errors import DeadlineExceeded, NotFound, SlipstreamError, Unavailable
from slipstream.v1 import kvstore_pb2

log = logging.getLogger(__name__)

_RENEWALS_A_LEASE = 3
# The longest wait of a close, whatever the lenders do.
_LAST_RELEASES_S = 1.0
# The pin may be there.
_ANSWER_LOST = (DeadlineExceeded, Unavailable)


class ReaderPins:
    """The pins of one worker."""

    def __init__(self, peers: Peers) -> None:
        self._calls = PinCalls(peers)
        self._releases = PinReleases()
        self._background: set[asyncio.Task[None]] = set()
        self.held = 0  # their lender may still hold them

    def begin(self, endpoint: str, request: kvstore_pb2.PinRequest) -> PinLease:
        """Request a pin; `PinLease.release` must follow."""
        carried = self._releases.add_to(endpoint, request)
        answer = asyncio.create_task(self._calls.pin(endpoint, request))
        answer.add_done_callback(functools.partial(on_pin_ended, carried))
        self.held += 1
        return PinLease(self, endpoint, request.name, answer)

    async def close(self) -> None:
        """End the streams after the releases under way, but wait a moment only: leases end the other pins."""
        if self._background:
            await asyncio.wait(self._background, timeout=_LAST_RELEASES_S)
        for task in self._background:
            task.cancel()
        await self._calls.close()

    def keep(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run `work` in the background."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def release_soon(self, endpoint: str, lease_id: str, offered: asyncio.Future[bool]) -> None:
        """Release with the next pin at the lender, or alone where none follows."""
        try:
            if not await self._releases.was_carried(endpoint, lease_id, offered):
                await self._end(endpoint, lease_id)
        finally:
            self.held -= 1

    def offer(self, endpoint: str, lease_id: str) -> asyncio.Future[bool]:
        """See `PinReleases.offer`."""
        return self._releases.offer(endpoint, lease_id)

    async def release(self, endpoint: str, name_or_lease: str) -> None:
        """Release at once; "" = there is nothing to release."""
        try:
            if name_or_lease:
                await self._end(endpoint, name_or_lease)
        finally:
            self.held -= 1

    async def renew(self, endpoint: str, lease_id: str, lease_ms: int) -> None:
        """Renew until cancelled. If the pin ends nevertheless, its memory may hold other blocks: their
        checksums do not match, and the read ends there."""
        interval_s = lease_ms / 1e3 / _RENEWALS_A_LEASE
        request = kvstore_pb2.RenewPinRequest(lease_id=lease_id, lease_ms=lease_ms)
        while True:
            try:
                await self._calls.renew(endpoint, request, timeout_s=interval_s)
            except NotFound:
                log.warning("a pin ended while its blocks were being read")
                return
            except SlipstreamError as error:
                log.info("a pin was not renewed: %s", error)
            await asyncio.sleep(interval_s)

    async def _end(self, endpoint: str, name_or_lease: str) -> None:
        try:
            await self._calls.release(endpoint, name_or_lease)
        except SlipstreamError as error:
            log.info("a pin is left to its lease: %s", error)


class PinLease:
    """See the module's text."""

    def __init__(
        self, pins: ReaderPins, endpoint: str, name: str, answer: asyncio.Task[kvstore_pb2.PinResponse]
    ) -> None:
        self._pins = pins
        self._endpoint = endpoint
        self._name = name
        self.answer = answer

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the pin while inside. It has been answered."""
        pinned = self.answer.result()
        if not pinned.lease_id:
            yield
            return
        renewing: list[asyncio.Task[None]] = []

        def begin() -> None:
            renewal = self._pins.renew(self._endpoint, pinned.lease_id, pinned.lease_ms)
            renewing.append(self._pins.keep(renewal))

        # A restore is mostly over before the first renewal, and then needs no task for it.
        first = asyncio.get_running_loop().call_later(pinned.lease_ms / 1e3 / _RENEWALS_A_LEASE, begin)
        try:
            yield
        finally:
            first.cancel()
            for task in renewing:
                task.cancel()

    def release(self) -> None:
        """End the pin at the lender, whether it was answered, failed, or is still being made."""
        pins, name = self._pins, self._name
        if self.answer.done() and not self.answer.cancelled() and self.answer.exception() is None:
            lease_id = self.answer.result().lease_id
            if lease_id:
                offered = pins.offer(self._endpoint, lease_id)
                pins.keep(pins.release_soon(self._endpoint, lease_id, offered))
                return
            name = ""
        elif self.answer.done() and not self.answer.cancelled():
            name = name if isinstance(self.answer.exception(), _ANSWER_LOST) else ""
        self.answer.cancel()
        pins.keep(pins.release(self._endpoint, name))

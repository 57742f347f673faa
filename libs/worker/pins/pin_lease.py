"""One pin of a restore, from its request to its release.

    pin = pins.begin(endpoint, request)
    try:
        pinned = await pin.answer          # raises SlipstreamError
        with pin.renewed(): ...            # read
    finally:
        pin.let_go()

A pin is let go of in the background: nobody waits for it, and its lease ends it anyway.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager

from libs.worker.pins.peers import Peers
from libs.worker.pins.pin_calls import PinCalls
from libs.worker.pins.pin_releases import PinReleases, arrived
from slipstream.errors import DeadlineExceeded, NotFound, SlipstreamError, Unavailable
from slipstream.v1 import kvstore_pb2

log = logging.getLogger(__name__)

_RENEWALS_A_LEASE = 3
# A close waits for so long at most, whatever the lenders do.
_LAST_RELEASES_S = 1.0
# The pin may be there.
_ANSWER_LOST = (DeadlineExceeded, Unavailable)


class ReaderPins:
    """The pins of one worker."""

    def __init__(self, peers: Peers) -> None:
        self._calls = PinCalls(peers)
        self._releases = PinReleases()
        self._background: set[asyncio.Task[None]] = set()
        self.held = 0  # not let go of, or not told so yet

    def begin(self, endpoint: str, request: kvstore_pb2.PinRequest) -> PinLease:
        """Ask for a pin; `let_go` must follow."""
        riders = self._releases.board(endpoint, request)
        answer = asyncio.create_task(self._calls.pin(endpoint, request))
        answer.add_done_callback(functools.partial(arrived, riders))
        self.held += 1
        return PinLease(self, endpoint, request.name, answer)

    async def close(self) -> None:
        """End the streams once lenders were told of pins that were let go of. That may take a moment only:
        leases end those that are left."""
        if self._background:
            await asyncio.wait(self._background, timeout=_LAST_RELEASES_S)
        for task in self._background:
            task.cancel()
        await self._calls.close()

    def keep(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run in the background."""
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    async def release_some_time(self, endpoint: str, lease_id: str, offered: asyncio.Future[bool]) -> None:
        """With the next pin of the lender, or by itself where none follows."""
        try:
            if not await self._releases.rode(endpoint, lease_id, offered):
                await self._end(endpoint, lease_id)
        finally:
            self.held -= 1

    def offer(self, endpoint: str, lease_id: str) -> asyncio.Future[bool]:
        """See `PinReleases.offer`."""
        return self._releases.offer(endpoint, lease_id)

    async def release(self, endpoint: str, name_or_lease: str) -> None:
        """At once; "" = there is nothing to be released."""
        try:
            if name_or_lease:
                await self._end(endpoint, name_or_lease)
        finally:
            self.held -= 1

    async def renew(self, endpoint: str, lease_id: str, lease_ms: int) -> None:
        """Until cancelled. When the pin has ended all the same, its blocks may be others' by now: then their
        checksums tell, and the read ends where they do not match."""
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

    def let_go(self) -> None:
        """Also after a cancel, and whether or not it was answered: who is not waited for ends, and the lender
        then keeps nothing of it."""
        pins, name = self._pins, self._name
        if self.answer.done() and not self.answer.cancelled() and self.answer.exception() is None:
            lease_id = self.answer.result().lease_id
            if lease_id:
                offered = pins.offer(self._endpoint, lease_id)
                pins.keep(pins.release_some_time(self._endpoint, lease_id, offered))
                return
            name = ""
        elif self.answer.done() and not self.answer.cancelled():
            name = name if isinstance(self.answer.exception(), _ANSWER_LOST) else ""
        self.answer.cancel()
        pins.keep(pins.release(self._endpoint, name))

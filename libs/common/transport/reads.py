"""Time-outs, cancels and quarantine of reads, for both transports.

The transfer runs as a task that owns the destination until it ends. When the caller times out or cancels,
the supervisor stops the task and waits for it. So no late byte lands in memory that has another owner.
A task that does not end within `stop_timeout_s` keeps its destination quarantined while it runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from libs.common.transport.base import ReadOp, Region, RegionTable, TransferRefused, TransferTimeout

log = logging.getLogger(__name__)

# A running read. The supervisor sets the event when the caller has left, and the transfer ends soon after.
Transfer = Callable[[asyncio.Event], Awaitable[None]]


class ReadSupervisor:
    """The reads of one transport."""

    def __init__(self, *, stop_timeout_s: float) -> None:
        self._stop_timeout_s = stop_timeout_s
        self._destinations: dict[asyncio.Task[None], tuple[Region, ...]] = {}
        self._stops: dict[asyncio.Task[None], asyncio.Event] = {}
        self._late: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended."""
        return len(self._destinations)

    def quarantined(self, address: int, n_bytes: int) -> bool:
        """Whether a stopped transfer may still write to the range."""
        return any(
            region.overlaps(address, n_bytes) for task in self._late for region in self._destinations[task]
        )

    @property
    def quarantined_bytes(self) -> int:
        """Bytes of all destinations that are quarantined now."""
        return sum(region.n_bytes for task in self._late for region in self._destinations[task])

    def check_destinations(self, reads: Sequence[ReadOp], regions: RegionTable) -> None:
        """Raises TransferRefused unless every destination is in `regions` and free of late bytes."""
        for op in reads:
            if not regions.contains(op.local_address, op.n_bytes):
                raise TransferRefused(f"{op.local_address:#x}+{op.n_bytes} is not memory for reads")
            if self._late and self.quarantined(op.local_address, op.n_bytes):
                raise TransferRefused(f"{op.local_address:#x}+{op.n_bytes} is quarantined")

    async def run(
        self,
        transfer: Transfer,
        reads: Sequence[ReadOp],
        *,
        slots: asyncio.Semaphore,
        timeout_s: float,
    ) -> None:
        """Run `transfer`, which fills the destinations of `reads`, under the contract of `KvTransport.read`.

        The transfer waits for one of the peer's `slots`, within the time-out, and holds it until it ends.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await slots.acquire()
        except TimeoutError:
            raise TransferTimeout(f"other reads from this peer took all of {timeout_s:g} s") from None
        stop = asyncio.Event()
        task = asyncio.ensure_future(_as_coroutine(transfer, stop))
        self._destinations[task] = tuple(Region(op.local_address, op.n_bytes) for op in reads)
        self._stops[task] = stop
        task.add_done_callback(self._remove)
        task.add_done_callback(lambda _: slots.release())
        try:
            await asyncio.wait({task}, timeout=give_up_at - loop.time())
        except asyncio.CancelledError:
            if not task.done():
                await self._stop(task)
            raise
        if not task.done():
            await self._stop(task)
        if not task.done():
            raise TransferTimeout(f"no end after {timeout_s:g} s; destination quarantined", quiet=False)
        if task.cancelled():
            raise TransferTimeout("the transport was closed during the read")
        error = task.exception()
        if error is not None:
            raise error

    async def close(self) -> None:
        """Stop all transfers, wait `stop_timeout_s` for them, and cancel those that have not ended."""
        for stop in self._stops.values():
            stop.set()
        if self._destinations:
            await asyncio.wait(set(self._destinations), timeout=self._stop_timeout_s)
        left = set(self._destinations)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=self._stop_timeout_s)

    async def _stop(self, task: asyncio.Task[None]) -> None:
        """Stop the task and wait for its end, through any number of cancels, at most `stop_timeout_s`."""
        self._stops[task].set()
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._stop_timeout_s
        cancelled = False
        while not task.done() and (left_s := give_up_at - loop.time()) > 0:
            try:
                await asyncio.wait({task}, timeout=left_s)
            except asyncio.CancelledError:
                cancelled = True
        if not task.done():
            self._late.add(task)
            log.warning("%d destinations of a read are quarantined", len(self._destinations[task]))
        if cancelled:
            raise asyncio.CancelledError

    def _remove(self, task: asyncio.Task[None]) -> None:
        del self._destinations[task], self._stops[task]
        self._late.discard(task)
        if not task.cancelled():
            task.exception()  # a late failure was reported as a time-out already


async def _as_coroutine(transfer: Transfer, stop: asyncio.Event) -> None:
    await transfer(stop)

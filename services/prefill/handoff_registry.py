"""Live handoffs and the jobs that export their pages. When one of the two ends, the other ends too.

PrefillJob opens, publishes and completes a handoff. PrefillService passes on the calls of the decode worker
(services/decode/handoff.py): watch, renew, release.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from typing import Protocol

from libs.common.checksum import CHECKSUM_BYTES
from libs.common.telemetry.counters import Counters
from libs.worker.engine.page_exporter import ExportedPage
from libs.worker.requests.attempts import AttemptKey
from services.prefill.handoff_state import Handoff, HandoffState, HandoffTable
from slipstream.errors import FailedPrecondition, SlipstreamError
from slipstream.rpc.rpc_errors import from_failure, to_failure
from slipstream.v1 import prefill_pb2

log = logging.getLogger(__name__)

Complete = prefill_pb2.HandoffComplete
_SWEEP_S = 0.25
_UNREAD = ExportedPage(0, bytes(CHECKSUM_BYTES))


class HandoffExporter(Protocol):
    """Exports the pages of a handoff and holds them."""

    def end(self) -> None:
        """Stop and release the pages. Idempotent, returns at once."""
        ...

    def on_watched(self, first_block: int, draft_rows: int) -> None:
        """A reader watches, and needs the blocks from `first_block` on and so many rows of draft state."""
        ...

    def on_read(self, blocks: Sequence[int]) -> None:
        """The reader has these blocks."""
        ...


class HandoffRegistry:
    """The handoff table with its clock, its watchers and its exporters."""

    def __init__(self, counters: Counters, *, now_ms: Callable[[], float]) -> None:
        self._counters = counters
        self._now_ms = now_ms
        self._table: HandoffTable[Complete] = HandoffTable()
        self._exporters: dict[str, HandoffExporter] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._addresses: dict[str, list[int]] = {}  # of the published blocks
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def live(self) -> int:
        """Handoffs that hold pages."""
        return self._table.live

    def start(self) -> None:
        """Begin to end leases that run out."""
        self._sweeper = asyncio.create_task(self._sweep(), name="handoff leases")

    async def close(self) -> None:
        """Stop the clock; handoffs are ended by their jobs."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    def open(
        self, handoff_id: str, exporter: HandoffExporter, key: AttemptKey, *, n_blocks: int, lease_ms: int
    ) -> int:
        """A new handoff; returns the lease it got, milliseconds."""
        handoff = self._table.open(
            handoff_id, key, n_blocks=n_blocks, lease_ms=lease_ms, now_ms=self._now_ms()
        )
        self._exporters[handoff_id] = exporter
        self._changed[handoff_id] = asyncio.Event()
        self._addresses[handoff_id] = []
        self._counters.add("slipstream_handoffs_total")
        return handoff.lease_ms

    def publish(self, handoff_id: str, exported: Sequence[ExportedPage | None]) -> None:
        """The next blocks can be read; None: no reader needs the block."""
        blocks = [block or _UNREAD for block in exported]
        self._table.publish(handoff_id, [block.checksum for block in blocks])
        self._addresses[handoff_id] += [block.address for block in blocks]
        self._notify(handoff_id)

    def complete(self, handoff_id: str, result: Complete) -> None:
        """The prompt is done. A request that ended with its first token needs no KV: its handoff ends."""
        self._table.complete(handoff_id, result, needs_blocks=not result.finish_reason)
        self._notify(handoff_id)
        if result.finish_reason:
            self.release(handoff_id)

    def hold(self, handoff_id: str) -> bool:
        """Keep the lease alive until `unhold`; False when the handoff has ended already."""
        if not self._table.get(handoff_id).state.live:
            return False
        self._table.hold(handoff_id, self._now_ms())
        return True

    def unhold(self, handoff_id: str) -> None:
        """Undo one `hold`."""
        self._table.unhold(handoff_id, self._now_ms())

    def renew(self, handoff_id: str, lease_ms: int, read_blocks: Sequence[int] = ()) -> None:
        """Extend the lease; the reader has `read_blocks`. Raises NotFound when it has ended."""
        self._table.renew(handoff_id, lease_ms, self._now_ms())
        self._exporters[handoff_id].on_read(read_blocks)

    def release(self, handoff_id: str) -> None:
        """The reader is done."""
        self._ended(self._table.release(handoff_id))

    def fail(self, handoff_id: str, error: SlipstreamError) -> None:
        """The export cannot be completed."""
        # A copy, because the error's traceback refers to the frames of the job, and so to the prompt.
        remembered = from_failure(to_failure(error))
        self._ended(self._table.fail(handoff_id, remembered))

    def cancel(self, key: AttemptKey) -> None:
        """The attempt was aborted."""
        self._ended(self._table.cancel(key))

    async def watch(
        self, handoff_id: str, key: AttemptKey, first_block: int = 0, draft_rows: int = 0
    ) -> AsyncGenerator[prefill_pb2.WatchHandoffResponse, None]:
        """The handoff's events until it is complete or ended. The caller reads from `first_block` on."""
        handoff = self._table.get(handoff_id)
        if handoff.key != key:
            raise FailedPrecondition(f"handoff {handoff_id} belongs to {handoff.key}, not {key}")
        if self.hold(handoff_id):
            self._exporters[handoff_id].on_watched(first_block, draft_rows)
        try:
            sent = 0
            while True:
                changed = self._changed.get(handoff_id)
                if sent < len(handoff.checksums) and handoff.state.live:
                    fresh = handoff.checksums[sent:]
                    addresses = self._addresses[handoff_id][sent:]
                    ready = prefill_pb2.BlocksReady(
                        first_block=sent, checksums=b"".join(fresh), addresses=addresses
                    )
                    sent += len(fresh)
                    yield prefill_pb2.WatchHandoffResponse(ready=ready)
                    continue
                if handoff.result is not None and (handoff.state.live or handoff.result.finish_reason):
                    yield prefill_pb2.WatchHandoffResponse(complete=handoff.result)
                    return
                if changed is None:
                    yield prefill_pb2.WatchHandoffResponse(failure=to_failure(_why_ended(handoff)))
                    return
                await changed.wait()
        finally:
            self.unhold(handoff_id)

    def _ended(self, handoffs: Iterable[Handoff[Complete]]) -> None:
        for handoff in handoffs:
            if handoff.state is HandoffState.EXPIRED:
                log.warning("the lease of %s (%s) ran out", handoff.handoff_id, handoff.key)
                self._counters.add("slipstream_handoffs_expired_total")
            self._addresses.pop(handoff.handoff_id)
            self._changed.pop(handoff.handoff_id).set()
            self._exporters.pop(handoff.handoff_id).end()

    def _notify(self, handoff_id: str) -> None:
        self._changed[handoff_id].set()
        self._changed[handoff_id] = asyncio.Event()

    async def _sweep(self) -> None:
        while True:
            self._ended(self._table.expire(self._now_ms()))
            due_ms = self._table.next_expiry_ms()
            wait_s = _SWEEP_S if due_ms is None else (due_ms - self._now_ms()) / 1e3
            await asyncio.sleep(min(max(wait_s, 0.01), _SWEEP_S))


def _why_ended(handoff: Handoff[Complete]) -> SlipstreamError:
    return handoff.error or FailedPrecondition(f"handoff {handoff.handoff_id} was released")

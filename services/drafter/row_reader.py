"""Rows that decode workers exported, read by the KV transport, and the order of what waits for them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from libs.common.cluster.address_book import AddressBook
from libs.common.telemetry.counters import Counters
from libs.common.transport.base import KvTransport
from libs.worker.engine.feature_memory import ExportedFeatures, FeatureMemory
from slipstream.errors import DataCorrupt, SlipstreamError

log = logging.getLogger(__name__)


class RowReader:
    """Reads of one drafter, for all its streams. Event loop only."""

    def __init__(
        self, transport: KvTransport, memory: FeatureMemory, addresses: AddressBook, counters: Counters
    ) -> None:
        self.transport = transport
        self._memory = memory
        self._addresses = addresses
        self._counters = counters

    async def read(self, session_id: str, exported: ExportedFeatures, n_bytes: int) -> bytes | None:
        """The verified bytes; None if they cannot be had, which costs drafts only."""
        try:
            await self._addresses.check_session(session_id)
            packed = await self._memory.read(session_id, exported, n_bytes)
        except SlipstreamError as error:
            if isinstance(error, DataCorrupt):
                self._counters.add("slipstream_kv_checksum_failures_total")
            log.warning("draft features are not read: %s", error.message)
            packed = None
        if packed is None:
            self._counters.add("slipstream_draft_rows_unread_total")
        else:
            self._counters.add("slipstream_feature_bytes_pulled_total", n_bytes)
        return packed


class SequenceOrder:
    """Steps of a stream's sequences that wait: those of one sequence run one after the other."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._newest: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, seq_id: str) -> bool:
        """Whether a step of the sequence has not ended."""
        return seq_id in self._newest

    @property
    def names(self) -> set[str]:
        """The sequences with such steps."""
        return set(self._newest)

    def add(self, seq_id: str, step: Callable[[], Awaitable[None]]) -> None:
        """Run `step` when the earlier ones of the sequence have ended."""
        task = asyncio.create_task(_run_after(self._newest.get(seq_id), step), name=f"rows of {seq_id}")
        self._newest[seq_id] = task
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._remove(seq_id, task))

    def cancel(self) -> None:
        """End all steps; none of them goes on."""
        for task in self._tasks:
            task.cancel()

    def _remove(self, seq_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._newest.get(seq_id) is task:
            del self._newest[seq_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("rows of %s are lost", seq_id, exc_info=error)


async def _run_after(earlier: asyncio.Task[None] | None, step: Callable[[], Awaitable[None]]) -> None:
    if earlier is not None:
        await asyncio.wait({earlier})
    await step()

"""Reads blocks of a peer into this worker's pages, in batches, and verifies each block's checksum."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from libs.common.telemetry.counters import Counters
from libs.common.transport.base import KvTransport, ReadOp
from libs.worker.engine.engine_thread import EngineThread
from libs.worker.engine.page_memory import PageMemory
from slipstream.errors import DataCorrupt

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 10.0
# Adjacent reads are joined up to this size, so that blocks are verified while further ones arrive.
JOINED_BYTES = 2 << 20
_QUARANTINE_POLL_S = 0.25
_MAX_READS = 4


@dataclass(frozen=True, slots=True)
class RemoteBlock:
    """A block at a peer, and the page of this worker for it."""

    page: int
    address: int
    checksum: bytes


@dataclass(slots=True)
class FetchStats:
    """Totals of one sequence's fetches. `elapsed_ms` is the sum of the reads, verification included."""

    n_blocks: int = 0  # leading verified blocks of each batch
    n_bytes: int = 0
    elapsed_ms: float = 0.0


class BlockFetcher:
    """Reads of one worker. At most `_MAX_READS` run at once, over all its sequences."""

    def __init__(
        self,
        transport: KvTransport,
        memory: PageMemory,
        thread: EngineThread,
        counters: Counters,
        *,
        batch_bytes: int = 16 << 20,
    ) -> None:
        self._transport = transport
        self._memory = memory
        self._thread = thread
        self._counters = counters
        self.page_bytes = memory.page_bytes
        self._slots = asyncio.Semaphore(_MAX_READS)
        self.batch_blocks = max(1, min(64, batch_bytes // memory.page_bytes))
        self._unpinning: set[asyncio.Task[None]] = set()
        self.quarantined_pages = 0

    async def pull(
        self,
        session_id: str,
        blocks: Sequence[RemoteBlock],
        stats: FetchStats,
        *,
        on_verified: Callable[[int], None] = lambda n_blocks: None,
    ) -> None:
        """Fill the pages in order. Raises TransferError, or DataCorrupt when a block's checksum differs.

        The fetcher calls `on_verified` on the event loop with the number of further leading blocks that are
        verified. They stay valid if the pull fails later.
        """
        for start in range(0, len(blocks), self.batch_blocks):
            batch = blocks[start : start + self.batch_blocks]
            async with self._slots:
                await self._pull_batch(session_id, batch, stats, on_verified)

    async def pin_late_pages(self, pages: Sequence[int]) -> None:
        """Pin those of the pages that late bytes may still overwrite, until the transport's read ends.

        The owner calls this before it releases the pages.
        """
        late = self._quarantined(pages)
        if not late:
            return
        log.warning("%d pages wait for late bytes of a failed read", len(late))
        self.quarantined_pages += len(late)
        pinned = self._thread.pin(late)
        task = asyncio.create_task(self._unpin_when_quiet(late))
        self._unpinning.add(task)
        task.add_done_callback(self._unpinning.discard)
        await asyncio.shield(pinned)

    def late_pages(self, pull: asyncio.Future[None], pages: Sequence[int], n_verified: int) -> Sequence[int]:
        """The pages after the first `n_verified` that a cancelled or failed `pull` may still write to."""
        if pull.done():
            return self._quarantined(pages[n_verified:])
        return pages[n_verified : (n_verified // self.batch_blocks + 1) * self.batch_blocks]

    async def abandon(self, pull: asyncio.Future[None], pages: Sequence[int]) -> asyncio.Future[None]:
        """Pin pages that a cancelled pull may still write to, and return once they are pinned.

        The returned future is done when no late byte can land and the pages are unpinned.
        """
        late = list(pages)
        self.quarantined_pages += len(late)
        log.warning("%d pages wait for late bytes of a cancelled read", len(late))
        pinned = self._thread.pin(late)

        async def end() -> None:
            await asyncio.wait({pull})
            await self._unpin_when_quiet(late)

        task = asyncio.create_task(end())
        self._unpinning.add(task)
        task.add_done_callback(self._unpinning.discard)
        cancelled = False
        while not pinned.done():  # the pin must precede a release of the pages, which overtakes commands
            try:
                await asyncio.wait({pinned})
            except asyncio.CancelledError:
                cancelled = True
        if cancelled:
            raise asyncio.CancelledError
        pinned.result()
        return task

    async def _pull_batch(
        self,
        session_id: str,
        blocks: Sequence[RemoteBlock],
        stats: FetchStats,
        on_verified: Callable[[int], None],
    ) -> None:
        started = time.perf_counter()
        size = self._memory.page_bytes
        reads = merge_reads(
            (ReadOp(self._memory.address_of(b.page), b.address, size) for b in blocks),
            at_most_bytes=JOINED_BYTES,
        )
        arriving = _ArrivingBlocks(self._memory, blocks, reads, stats, on_verified)
        try:
            await self._transport.read(session_id, reads, timeout_s=READ_TIMEOUT_S, landed=arriving.verify)
        finally:
            arriving.advance()
        wrong = len(blocks) - len(arriving.good)
        n_bytes = len(blocks) * size
        stats.n_bytes += n_bytes
        stats.elapsed_ms += (time.perf_counter() - started) * 1e3
        self._counters.add("slipstream_kv_bytes_pulled_total", n_bytes)
        if wrong:
            self._counters.add("slipstream_kv_checksum_failures_total", wrong)
            raise DataCorrupt(f"{wrong} of {len(blocks)} KV blocks from {session_id} have a wrong checksum")

    def _quarantined(self, pages: Sequence[int]) -> list[int]:
        size = self._memory.page_bytes
        return [p for p in pages if self._transport.quarantined(self._memory.address_of(p), size)]

    async def _unpin_when_quiet(self, pages: Sequence[int]) -> None:
        waiting = list(pages)
        while waiting:
            await asyncio.sleep(_QUARANTINE_POLL_S)
            late = self._quarantined(waiting)
            quiet = [p for p in waiting if p not in late]
            if quiet:
                await asyncio.shield(self._thread.unpin(quiet))
                self.quarantined_pages -= len(quiet)
                waiting = late


class _ArrivingBlocks:
    """The blocks of one batch of reads: verified as they land, and reported in order."""

    def __init__(
        self,
        memory: PageMemory,
        blocks: Sequence[RemoteBlock],
        reads: Sequence[ReadOp],
        stats: FetchStats,
        on_verified: Callable[[int], None],
    ) -> None:
        self._memory, self._blocks, self._stats, self._on_verified = memory, blocks, stats, on_verified
        self._loop = asyncio.get_running_loop()
        sizes = (op.n_bytes // memory.page_bytes for op in reads[:-1])
        self._first_of = dict(zip(reads, itertools.accumulate(sizes, initial=0), strict=True))
        self._n_leading = 0
        self.good: set[int] = set()

    def verify(self, op: ReadOp) -> None:
        """Compare the checksums of a read that has landed. Called on a thread of the transport."""
        first = self._first_of[op]
        for index in range(first, first + op.n_bytes // self._memory.page_bytes):
            block = self._blocks[index]
            if self._memory.checksum(block.page, has_landed=True) == block.checksum:
                self.good.add(index)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.advance)

    def advance(self) -> None:
        """Report the verified blocks that follow those reported before."""
        before = self._n_leading
        while self._n_leading in self.good:
            self._n_leading += 1
        if self._n_leading > before:
            self._stats.n_blocks += self._n_leading - before
            self._on_verified(self._n_leading - before)


def merge_reads(reads: Iterable[ReadOp], *, at_most_bytes: int) -> list[ReadOp]:
    """Join reads that are adjacent on both sides into fewer, longer ones."""
    merged: list[ReadOp] = []
    for read in reads:
        last = merged[-1] if merged else None
        if (
            last is not None
            and last.local_address + last.n_bytes == read.local_address
            and last.remote_address + last.n_bytes == read.remote_address
            and last.n_bytes + read.n_bytes <= at_most_bytes
        ):
            merged[-1] = ReadOp(last.local_address, last.remote_address, last.n_bytes + read.n_bytes)
        else:
            merged.append(read)
    return merged

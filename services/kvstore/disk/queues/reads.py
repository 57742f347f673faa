"""Reads of one disk: the reader interface, its threaded form, and the reads of one call."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from services.kvstore.disk.queues.queue import DiskCalls, DiskQueue, Ended
from services.kvstore.disk.segments.files import BlockRead, SegmentFiles, follows
from services.kvstore.disk.table.block import DiskBlock
from slipstream.errors import SlipstreamError

READ_THREADS = 8  # half of them wait for the interpreter or verify while the others keep the disk busy

# Length and payload checksum of a verified block, or the error.
ReadResult = tuple[int, bytes] | SlipstreamError
OnRead = Callable[[int, ReadResult], None]
# Reads and verifies blocks; the results are None, OSError or DataCorrupt.
BlockReader = DiskCalls[BlockRead]


def threaded_reader(files: SegmentFiles, clock_s: Callable[[], float]) -> BlockReader:
    """A reader with interpreter threads, through the files' `DiskIo`."""
    return DiskQueue("kv-read", ReadWork(files), n_threads=READ_THREADS, clock_s=clock_s)


def location(read: BlockRead) -> tuple[int, int]:
    """The block's position on the disk."""
    return read.slot.slab, read.slot.index


class ReadWork:
    """Reads through the files' `DiskIo`. A batch is a run of neighbouring blocks."""

    def __init__(self, files: SegmentFiles) -> None:
        self._files = files

    def sort(self, added: list[BlockRead]) -> None:
        """In the order of the disk, so that neighbours follow each other."""
        added.sort(key=location)

    def pop_batch(self, waiting: deque[BlockRead]) -> list[BlockRead]:
        run = [waiting.popleft()]
        while waiting and follows(run[-1].slot, waiting[0].slot, len(run)):
            run.append(waiting.popleft())
        return run

    def run(self, batch: Sequence[BlockRead]) -> Sequence[Ended]:
        return self._files.load(batch)


class DiskReads:
    """The reads of one call, and their results.

    The `async with` block waits for all reads, also after an error: they write to memory until then.
    """

    def __init__(
        self, wanted: Sequence[tuple[bytes, int]], missing: SlipstreamError, on_read: OnRead | None
    ) -> None:
        """`wanted`: keys and destination addresses. `missing`: the result of blocks that are not found."""
        self._wanted = wanted
        self.results: list[ReadResult] = [missing] * len(wanted)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_read = on_read
        self._n_left = 1  # one more than the running reads until all are found

    def found(self, first: int, blocks: Sequence[DiskBlock | None]) -> tuple[list[BlockRead], list[int]]:
        """The reads of those blocks, wanted from position `first` on, that exist, and their positions."""
        items: list[BlockRead] = []
        positions: list[int] = []
        for position, block in enumerate(blocks, first):
            if block is not None:
                items.append(BlockRead(block, self._wanted[position][1]))
                positions.append(position)
        self._n_left += len(items)
        return items, positions

    def end(self, position: int, result: ReadResult) -> None:
        """Record one result."""
        self.results[position] = result
        self._end_one()
        if self._on_read is not None:
            self._on_read(position, result)

    async def __aenter__(self) -> DiskReads:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end_one()
        await self._done

    def _end_one(self) -> None:
        self._n_left -= 1
        if not self._n_left and not self._done.done():
            self._done.set_result(None)

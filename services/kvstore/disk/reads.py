"""Reads of one disk: whoever does them, each one's end is told on the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from services.kvstore.disk.queue import DiskQueue, OnEnd
from services.kvstore.disk.segments.files import BlockRead, SegmentFiles, follows
from services.kvstore.disk.table.block import DiskBlock
from slipstream.errors import SlipstreamError

READ_THREADS = 8  # half of them wait for the interpreter or verify while the others keep the disk busy

# Length and payload checksum of a block that was read and verified, or why it cannot be had.
ReadResult = tuple[int, bytes] | SlipstreamError
OnRead = Callable[[int, ReadResult], None]


class BlockReader(Protocol):
    """Reads and verifies blocks. Event loop only."""

    def __len__(self) -> int:
        """Reads that wait or run."""

    @property
    def running_since_s(self) -> float | None:
        """When the oldest running read began; None when none runs."""

    def add(self, items: Sequence[BlockRead], on_end: OnEnd) -> None:
        """Read them soon. `on_end` is told how each ended, by its position: None, OSError, DataCorrupt."""

    def give_up_waiting(self, error: Exception) -> None:
        """End all reads that have not begun."""

    def close(self, *, wait: bool) -> None:
        """No more reads; with `wait`, returns when the threads have ended."""


def threaded_reader(files: SegmentFiles, clock_s: Callable[[], float]) -> BlockReader:
    """Reads in threads of the interpreter, through the files' `DiskIo`."""
    return DiskQueue(
        "kv-read", n_threads=READ_THREADS, take=_take_run, work=files.load, order=place, clock_s=clock_s
    )


def place(read: BlockRead) -> tuple[int, int]:
    """Where on the disk the block is."""
    return read.slot.slab, read.slot.index


class DiskReads:
    """Reads that one caller asked for together, and their results.

    Its end waits for theirs, also after an error: until then their memory is written to.
    """

    def __init__(
        self, wanted: Sequence[tuple[bytes, int]], missing: SlipstreamError, told: OnRead | None
    ) -> None:
        """`wanted`: keys and where to read them to; `missing`: what those get that are not found."""
        self._wanted = wanted
        self.results: list[ReadResult] = [missing] * len(wanted)
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._told = told
        self._n_left = 1  # until no more will be found

    def found(self, first: int, blocks: Sequence[DiskBlock | None]) -> tuple[list[BlockRead], list[int]]:
        """What to read of those that are wanted from position `first` on, with their positions."""
        items: list[BlockRead] = []
        positions: list[int] = []
        for position, block in enumerate(blocks, first):
            if block is not None:
                items.append(BlockRead(block, self._wanted[position][1]))
                positions.append(position)
        self._n_left += len(items)
        return items, positions

    def end(self, position: int, result: ReadResult) -> None:
        """One of them ended."""
        self.results[position] = result
        self._end_one()
        if self._told is not None:
            self._told(position, result)

    async def __aenter__(self) -> DiskReads:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end_one()
        await self._done

    def _end_one(self) -> None:
        self._n_left -= 1
        if not self._n_left and not self._done.done():
            self._done.set_result(None)


def _take_run(waiting: deque[BlockRead]) -> list[BlockRead]:
    run = [waiting.popleft()]
    while waiting and follows(run[-1].slot, waiting[0].slot, len(run)):
        run.append(waiting.popleft())
    return run

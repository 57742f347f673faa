"""Exports the blocks of one handoff, in order, to the decode worker that watches it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from libs.worker.engine.page_exporter import ExportedPage, PageExporter

# Bytes that one export copies, so that their reader begins while further ones are copied.
_BATCH_BYTES = 8 << 20
_MAX_BATCH_BLOCKS = 64

# Receives the next blocks as peers read them; None for a block that its reader does not need.
Publish = Callable[[Sequence[ExportedPage | None]], None]


class HandoffExport:
    """The blocks of one handoff. `close` always, however `run` ended. Event loop only.

    A block is exported once its bytes are final, its reader watches, and there is room. Its reader reports
    each block that it has read. So a handoff may be larger than the staging memory.
    """

    def __init__(self, exporter: PageExporter, pages: Sequence[int], publish: Publish) -> None:
        """`pages`: one for each block."""
        self._exporter = exporter
        self.pages = pages  # another one may replace a page that is not final
        self._publish = publish
        self._batch_blocks = max(1, min(_MAX_BATCH_BLOCKS, _BATCH_BYTES // exporter.page_bytes))
        self._n_final = 0
        self._n_published = 0
        self._first_read: int | None = None  # None until the reader watches
        self._exported: dict[int, ExportedPage] = {}
        self._changed = asyncio.Event()

    def advance(self, n_final: int) -> None:
        """The first `n_final` blocks have their final bytes."""
        self._n_final = max(self._n_final, n_final)
        self._changed.set()

    def on_watched(self, first_block: int) -> None:
        """The reader watches, and needs the blocks from `first_block` on."""
        if self._first_read is None:
            self._first_read = min(first_block, len(self.pages))
            self._changed.set()

    def on_read(self, blocks: Sequence[int]) -> None:
        """The reader has these blocks. Unknown ones are accepted."""
        read = [self._exported.pop(block) for block in blocks if block in self._exported]
        self._exporter.release(read)

    async def run(self) -> None:
        """Return when all blocks are published."""
        while self._n_published < len(self.pages):
            self._changed.clear()
            if self._first_read is None:
                await self._changed.wait()
            elif self._n_published < self._first_read:
                self._n_published = self._first_read
                self._publish([None] * self._first_read)
            elif not await self._export_next():
                await self._exporter.wait_for_room(self._changed)

    def close(self) -> None:
        """Release all copies."""
        held, self._exported = list(self._exported.values()), {}
        self._exporter.release(held)

    async def _export_next(self) -> bool:
        """Export and publish the next blocks. Returns whether there were any, and room for them."""
        first = self._n_published
        ready = self.pages[first : min(self._n_final, first + self._batch_blocks)]
        exported = await self._exporter.export(ready, is_read=True)
        self._exported.update(enumerate(exported, first))
        self._n_published += len(exported)
        if exported:
            self._publish(exported)
        return bool(exported)

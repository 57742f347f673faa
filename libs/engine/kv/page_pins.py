"""Pins keep pages from reuse while a peer reads them, even after the release of their sequence."""

from __future__ import annotations

from collections.abc import Sequence

from libs.engine.kv.block_manager import BlockManager
from libs.engine.step.types import FullBlock
from slipstream.errors import FailedPrecondition


class PagePins:
    """Counted pins over the pages of one cache; `len` is the number of pinned pages."""

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        self._pins: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, pages: Sequence[int]) -> None:
        """See `Engine.pin`."""
        self._blocks.acquire(pages)
        for page in pages:
            self._pins[page] = self._pins.get(page, 0) + 1

    def pin_blocks(self, blocks: Sequence[FullBlock]) -> tuple[FullBlock, ...]:
        """See `Engine.pin_blocks`."""
        found = tuple(FullBlock(b.hash, page) for b in blocks for page in self._blocks.match((b.hash,)))
        self.pin([block.page for block in found])
        return found

    def unpin(self, pages: Sequence[int], *, evict_first: bool) -> None:
        """See `Engine.unpin`. Raises FailedPrecondition for a page that is not pinned."""
        for page in pages:
            if page not in self._pins:
                raise FailedPrecondition(f"page {page} is not pinned")
            self._pins[page] -= 1
            if not self._pins[page]:
                del self._pins[page]
            self._blocks.release((page,), evict_first=evict_first)

"""The engine's pages as the transport sees them: addresses, bytes, checksums."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from libs.common.checksum import checksum
from libs.engine.types import Engine

# xxh3 runs at memory speed; beyond this many bytes it leaves the event loop's thread.
_INLINE_BYTES = 256 << 10


class PageMemory:
    """Pages of one engine. Reads bytes only; who may write them is the engine's business."""

    def __init__(self, engine: Engine) -> None:
        self.page_bytes = engine.info.page_bytes
        self.memory = engine.memory
        self.address = engine.memory_address
        self.n_bytes = engine.info.n_pages * self.page_bytes

    def address_of(self, page: int) -> int:
        """Address of the page's first byte."""
        return self.address + page * self.page_bytes

    async def checksums(self, pages: Sequence[int]) -> list[bytes]:
        """xxh3-128 of each page, big-endian, 16 bytes."""
        if len(pages) * self.page_bytes <= _INLINE_BYTES:
            return self._checksums(pages)
        return await asyncio.to_thread(self._checksums, pages)

    def _checksums(self, pages: Sequence[int]) -> list[bytes]:
        return [self.checksum(page) for page in pages]

    def checksum(self, page: int) -> bytes:
        """xxh3-128 of one page, at once, in the caller's thread."""
        return checksum(self.memory[page * self.page_bytes : (page + 1) * self.page_bytes])

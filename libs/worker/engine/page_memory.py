"""The engine's pages for transports: addresses, bytes, checksums."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from libs.common.checksum import checksum
from libs.engine.step.types import Engine

# xxh3 runs at memory speed. More bytes than this are hashed in another thread than the event loop's.
_INLINE_BYTES = 256 << 10


class PageMemory:
    """Pages of one engine, in the host or on a CUDA device. This class only reads them."""

    def __init__(self, engine: Engine) -> None:
        self.page_bytes = engine.info.page_bytes
        self.memory = engine.memory  # what the transport registers
        self.address = engine.memory_address
        self.n_bytes = engine.info.n_pages * self.page_bytes

    def address_of(self, page: int) -> int:
        """Address of the page's first byte."""
        return self.address + page * self.page_bytes

    def page(self, page: int) -> memoryview:
        """The bytes of one page: a view of host memory, or a copy of device memory."""
        span = slice(page * self.page_bytes, (page + 1) * self.page_bytes)
        if isinstance(self.memory, memoryview):
            return self.memory[span]
        return memoryview(self.memory[span].cpu().numpy())

    async def checksums(self, pages: Sequence[int]) -> list[bytes]:
        """xxh3-128 of each page, big-endian, 16 bytes."""
        inline = isinstance(self.memory, memoryview) and len(pages) * self.page_bytes <= _INLINE_BYTES
        if inline:
            return self._checksums(pages)
        return await asyncio.to_thread(self._checksums, pages)

    def _checksums(self, pages: Sequence[int]) -> list[bytes]:
        return [self.checksum(page) for page in pages]

    def checksum(self, page: int) -> bytes:
        """xxh3-128 of one page, computed in the caller's thread. A device's page is copied to the host."""
        return checksum(self.page(page))

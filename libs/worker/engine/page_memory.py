"""The engine's pages by number: addresses, bytes, checksums."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from libs.common.checksum import UNKEYED, KvChecksum
from libs.engine.step.types import Engine


class PageMemory:
    """Pages of one engine, in the host or on a CUDA device. This class only reads them."""

    def __init__(self, engine: Engine, checksum: KvChecksum = UNKEYED) -> None:
        self.page_bytes = engine.info.page_bytes
        self.memory = engine.memory
        self.address = engine.memory_address
        self.n_pages = engine.info.n_pages
        self._engine = engine
        self._parts = engine.page_parts
        self._checksum = checksum

    @property
    def is_on_host(self) -> bool:
        """Whether the processor reads the pages in place."""
        return isinstance(self.memory, memoryview)

    @property
    def is_complete(self) -> bool:
        """Whether `memory` has each page without `collect`."""
        return self._parts is None

    def collect(self, pages: Sequence[int]) -> None:
        """Bring pages that no step writes to `memory`, where parts of them are elsewhere.

        Before this the memory has only what peers wrote there. It may wait for a step.
        """
        if self._parts is not None:
            self._parts.collect(pages)

    def address_of(self, page: int) -> int:
        """Address of the page's first byte."""
        return self.address + page * self.page_bytes

    def page(self, page: int, *, has_landed: bool = False) -> memoryview:
        """The bytes of one page: a view of host memory, or a copy of device memory.

        `has_landed`: a read of the transport wrote it, and nothing else since.
        """
        if isinstance(self.memory, memoryview):
            return self.memory[page * self.page_bytes : (page + 1) * self.page_bytes]
        return self._engine.read_page(page, has_landed=has_landed)

    def checksum(self, page: int, *, has_landed: bool = False) -> bytes:
        """The checksum of one page, computed in the caller's thread; of a device's page by a copy.

        `has_landed`: see `page`.
        """
        if self.is_on_host:
            return self._checksum.at(self.address_of(page), self.page_bytes)
        return self._checksum.of(self.page(page, has_landed=has_landed))

    def copy(self, page: int, address: int) -> bytes:
        """Copy one page to host memory at `address`. Returns the checksum of the page, not of the copy."""
        if self.is_on_host:
            found = self.checksum(page)
            ctypes.memmove(address, self.address_of(page), self.page_bytes)
            return found
        private = self.page(page)
        ctypes.memmove(address, ctypes.addressof(ctypes.c_char.from_buffer(private)), self.page_bytes)
        return self._checksum.of(private)

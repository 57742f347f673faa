"""Manage KV pages: reference counts, prefix reuse by block hash, LRU eviction. Pure.

A page is in exactly one of three states:

    free     unreferenced, content unknown                   -> allocate
    cached   unreferenced, its block is findable by hash     -> acquire (a hit), or allocate evicts it
    held     referenced at least once, by sequences or pins  -> release

A hash names at most one page. A second page with the same block gets no name, and becomes free at its
release.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from libs.engine.step.types import PageChange
from slipstream.errors import Internal, OutOfPages


class BlockManager:
    """The pages of one cache. Not thread-safe."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self._references = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))  # a stack, so that recently used pages are reused first
        self._hash_of_page: dict[int, bytes] = {}
        self._page_of_hash: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.evicted_blocks = 0
        self._changes: list[PageChange] | None = None  # None until the first `poll_changes`

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def cached_pages(self) -> int:
        return len(self._cached)

    @property
    def held_pages(self) -> int:
        return self.n_pages - len(self._free) - len(self._cached)

    def references(self, page: int) -> int:
        """How often a page is held."""
        return self._references[page]

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Pages of the longest cached prefix of `hashes`, without a reference to them."""
        pages: list[int] = []
        for block_hash in hashes:
            page = self._page_of_hash.get(block_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def reserve(self, hit: Sequence[int], n_fresh: int, *, leave: int = 0) -> list[int]:
        """Reference the pages `hit` and `n_fresh` new ones, all or nothing; returns hit + new.

        `leave` pages stay available for others. Raises OutOfPages when the rest are fewer than `n_fresh`.
        """
        evictable = len(self._cached) - sum(page in self._cached for page in hit)
        available = len(self._free) + evictable - leave
        if n_fresh > available:
            raise OutOfPages(f"{n_fresh} KV pages needed, {available} of {self.n_pages} available")
        self.acquire(hit)
        return [*hit, *self.allocate(n_fresh)]

    def allocate(self, n: int) -> list[int]:
        """Reference `n` pages of unknown content once each, evicting the least recently used blocks."""
        if n > len(self._free) + len(self._cached):
            raise OutOfPages(f"{n} KV pages needed, {len(self._free) + len(self._cached)} available")
        pages = [self._free.pop() if self._free else self._evict() for _ in range(n)]
        for page in pages:
            self._references[page] = 1
        return pages

    def acquire(self, pages: Iterable[int]) -> None:
        """Add a reference to each page. Raises Internal for a free page."""
        for page in pages:
            if self._references[page] == 0:
                if page not in self._cached:
                    raise Internal(f"page {page} is free and cannot be referenced")
                del self._cached[page]
            self._references[page] += 1

    def release(self, pages: Sequence[int], *, evict_first: bool = False) -> None:
        """Drop one reference to each page.

        `pages` are in prefix order, so that the end of a prefix is evicted before its start. With
        `evict_first`, pages without a reference are evicted before all others.
        """
        for page in pages if evict_first else reversed(pages):
            if self._references[page] < 1:
                raise Internal(f"page {page} is released but not held")
            self._references[page] -= 1
            if self._references[page]:
                continue
            if page in self._hash_of_page:
                self._cached[page] = None
                if evict_first:
                    self._cached.move_to_end(page, last=False)
            else:
                self._free.append(page)

    def commit(self, page: int, block_hash: bytes) -> bool:
        """Make a held page findable by its block's hash; False when another page has that hash."""
        if self._references[page] < 1:
            raise Internal(f"page {page} is committed but not held")
        if block_hash in self._page_of_hash or page in self._hash_of_page:
            return self._page_of_hash.get(block_hash) == page
        self._page_of_hash[block_hash] = page
        self._hash_of_page[page] = block_hash
        self._note(block_hash, stored=True)
        return True

    def uncache(self, pages: Iterable[int]) -> None:
        """Remove held pages from the hash index, so that their content is not reused."""
        for page in pages:
            block_hash = self._hash_of_page.pop(page, None)
            if block_hash is not None:
                del self._page_of_hash[block_hash]
                self._note(block_hash, stored=False)

    def poll_changes(self) -> list[PageChange]:
        """Blocks that became findable, or no longer are, since the last call, in order.

        The first call returns all findable blocks and starts the recording. From then on changes accumulate
        until the next call.
        """
        changes = self._changes
        self._changes = []
        return [PageChange(h, True) for h in self._page_of_hash] if changes is None else changes

    def check(self) -> None:
        """Raises Internal unless every page is in exactly one state and the two maps are inverse."""
        held = {page for page, references in enumerate(self._references) if references}
        states = sorted([*self._free, *self._cached, *held])
        if states != list(range(self.n_pages)):
            raise Internal(f"pages are lost or in two states: {states}")
        if min(self._references, default=0) < 0:
            raise Internal("negative reference count")
        if {page: block_hash for block_hash, page in self._page_of_hash.items()} != self._hash_of_page:
            raise Internal("hash maps disagree")
        if any(page not in self._hash_of_page for page in self._cached):
            raise Internal("a cached page has no hash")
        if any(page in self._hash_of_page for page in self._free):
            raise Internal("a free page has a hash")

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of_page.pop(page)
        del self._page_of_hash[block_hash]
        self._note(block_hash, stored=False)
        self.evicted_blocks += 1
        return page

    def _note(self, block_hash: bytes, *, stored: bool) -> None:
        if self._changes is not None:
            self._changes.append(PageChange(block_hash, stored))

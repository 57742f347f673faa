"""Pages that copies hold while they run without the engine's lock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from libs.engine.kv.block_manager import BlockManager


class CopiedPages:
    """Released sequences leave these pages; other sequences get them only when their copies have ended."""

    def __init__(self, blocks: BlockManager, unlocked: Callable[[], AbstractContextManager[None]]) -> None:
        """`unlocked`: releases the engine's lock for a while, which the calls here are under."""
        self._blocks = blocks
        self._unlocked = unlocked
        self._holds: Counter[int] = Counter()

    def count_pages(self) -> int:
        """Pages that copies alone hold: the sequences that had them are released."""
        return sum(self._blocks.references(page) == n for page, n in self._holds.items())

    @contextmanager
    def copying(self, pages: Sequence[int]) -> Iterator[None]:
        """Hold `pages`, and release the lock inside the block."""
        self._blocks.acquire(pages)
        self._holds.update(pages)
        try:
            with self._unlocked():
                yield
        finally:
            self._holds -= Counter(pages)
            self._blocks.release(pages)  # marks them as recently used, so that they are not evicted next

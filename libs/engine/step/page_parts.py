"""Pages whose bytes are spread over the memories of several processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class PageParts(Protocol):
    """Moves pages between the memories where steps write them and `Engine.memory`, page for page.

    Peers read and write `Engine.memory`, in which each page has one place. Steps change nothing there.
    """

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy the first page of each pair to the second, for steps. The engine's thread only."""
        ...

    def collect(self, pages: Sequence[int]) -> None:
        """Copy pages that no step writes to `Engine.memory`. Any thread; takes turns with steps."""
        ...

    def scatter(self, pages: Sequence[int]) -> None:
        """Copy pages from `Engine.memory` to where steps read them. Any thread; takes turns with steps.

        No step reads or writes the pages meanwhile.
        """
        ...

"""Which part of every KV page one rank of a KV split holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from libs.engine.step.batch import Int32Array


@dataclass(frozen=True, slots=True)
class KvShare:
    """Part `part` of `parts` of the slots of each page; `parts` divides them. The default is all of them.

    A page is cut, instead of whole pages going to different ranks: so every rank has room for the same pages,
    whichever ones a sequence gets.
    """

    part: int = 0
    parts: int = 1

    def slots(self, block_tokens: int) -> slice:
        """The slots of a page that the share has."""
        width = block_tokens // self.parts
        return slice(self.part * width, (self.part + 1) * width)

    def holds(self, offsets: Int32Array, block_tokens: int) -> npt.NDArray[np.bool_]:
        """Whether the share has each of these slots of a page."""
        slots = self.slots(block_tokens)
        held: npt.NDArray[np.bool_] = (offsets >= slots.start) & (offsets < slots.stop)
        return held

    def local_pages(self, pages: Int32Array, offsets: Int32Array, block_tokens: int) -> Int32Array:
        """The pages of slots, -1 where the share has not the slot."""
        if self.parts == 1:
            return pages
        return np.where(self.holds(offsets, block_tokens), pages, np.int32(-1))

    def count(self, n_tokens: Int32Array, block_tokens: int) -> Int32Array:
        """How many of the first `n_tokens` positions of a context the share has."""
        if self.parts == 1:
            return np.ascontiguousarray(n_tokens, dtype=np.int32)
        slots = self.slots(block_tokens)
        width = slots.stop - slots.start
        last = np.clip(n_tokens % block_tokens - slots.start, 0, width)
        return np.ascontiguousarray(n_tokens // block_tokens * width + last, dtype=np.int32)

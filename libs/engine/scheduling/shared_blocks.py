"""Blocks that one running prompt takes over from another one: copied into its own page once they are full.

A copy, not a reference: the addresses of a prompt's pages are given to peers before it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libs.engine.kv.block_manager import BlockManager
from libs.engine.kv.sequence import EngineSequence
from libs.engine.scheduling.prefix_sharing import Following, PrefixWork, find_followers
from libs.engine.step.types import DeviceBytes, EngineInfo


class SharedBlocks:
    """What running prompts share in one cache. `memory`: as Engine.memory; without `enabled`, nothing."""

    def __init__(
        self,
        blocks: BlockManager,
        memory: memoryview | DeviceBytes,
        info: EngineInfo,
        *,
        enabled: bool = True,
    ) -> None:
        self._blocks = blocks
        self._memory: Any = memory  # slices of either are assigned alike
        self._page_bytes = info.page_bytes
        self._block_tokens = info.block_tokens
        self._enabled = enabled

    def take_over(self, prefilling: Sequence[EngineSequence]) -> dict[str, int]:
        """Copy what became findable since they looked last; returns the tokens each was spared."""
        if not self._enabled:
            return {}
        return {s.spec.seq_id: n_tokens for s in prefilling if (n_tokens := self._take_over(s))}

    def followers(self, prefilling: Sequence[EngineSequence]) -> dict[str, Following]:
        """Who waits for whom in the next step. Call after `take_over`."""
        if not self._enabled or len(prefilling) < 2:
            return {}
        work = [PrefixWork(s.spec.seq_id, s.arrival, s.n_computed, self._reusable(s)) for s in prefilling]
        return find_followers(work, block_tokens=self._block_tokens)

    def _reusable(self, sequence: EngineSequence) -> list[bytes]:
        """The last token is always computed: its block is never taken over."""
        return sequence.full_block_hashes((sequence.n_tokens - 1) // self._block_tokens)

    def _take_over(self, sequence: EngineSequence) -> int:
        first = sequence.n_computed // self._block_tokens
        found = self._blocks.match(self._reusable(sequence)[first:])
        if not found:
            return 0
        for source, target in zip(found, sequence.pages[first:], strict=False):
            self._copy(source, target)
        # Used just now: they are not the next to be evicted.
        self._blocks.acquire(found)
        self._blocks.release(found)
        before = sequence.n_computed
        sequence.n_computed = (first + len(found)) * self._block_tokens
        return sequence.n_computed - before

    def _copy(self, source: int, target: int) -> None:
        size = self._page_bytes
        self._memory[target * size : (target + 1) * size] = self._memory[source * size : (source + 1) * size]

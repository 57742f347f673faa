"""Copy full blocks of one running prompt into the pages of another prompt with the same prefix.

The block is copied and not referenced, because peers know the addresses of a prompt's pages before it runs.
"""

from __future__ import annotations

from collections.abc import Sequence

from libs.engine.kv.block_manager import BlockManager
from libs.engine.kv.copied_pages import CopiedPages
from libs.engine.kv.page_copies import PageCopies
from libs.engine.kv.sequence import EngineSequence
from libs.engine.scheduling.prefix_sharing import Following, PrefixWork, find_followers
from libs.engine.step.types import EngineInfo


class SharedBlocks:
    """Shares blocks among the running prompts of one cache."""

    def __init__(
        self,
        blocks: BlockManager,
        copies: PageCopies,
        copied: CopiedPages,
        info: EngineInfo,
        *,
        enabled: bool = True,
    ) -> None:
        self._blocks = blocks
        self._copies = copies
        self._copied = copied
        self._block_tokens = info.block_tokens
        self._enabled = enabled

    def copy_new(self, prefilling: Sequence[EngineSequence]) -> dict[str, int]:
        """Copy the blocks that became findable since the last call; returns the tokens saved per sequence.

        Releases the lock while it copies: a copy by the ranks of a group waits for other commands of them.
        """
        if not self._enabled:
            return {}
        users = [s for s in prefilling if not s.scores_prompt]
        return {s.spec.seq_id: n_tokens for s in users if (n_tokens := self._copy_new(s))}

    def followers(self, prefilling: Sequence[EngineSequence]) -> dict[str, Following]:
        """Find the followers for the next step, after `copy_new`. See `find_followers`."""
        if not self._enabled or len(prefilling) < 2:
            return {}
        work = [
            PrefixWork(s.spec.seq_id, s.arrival, s.n_computed, self._reusable(s))
            for s in prefilling
            if not s.scores_prompt
        ]
        return find_followers(work, block_tokens=self._block_tokens)

    def _reusable(self, sequence: EngineSequence) -> list[bytes]:
        """Hashes of the blocks that may be copied: all but that of the last token, which is computed."""
        return sequence.full_block_hashes((sequence.n_tokens - 1) // self._block_tokens)

    def _copy_new(self, sequence: EngineSequence) -> int:
        first = sequence.n_computed // self._block_tokens
        found = self._blocks.match(self._reusable(sequence)[first:])
        if not found:
            return 0
        with self._copied.copying(found):
            self._copies.copy(zip(found, sequence.pages[first:], strict=False))
        before = sequence.n_computed
        sequence.n_computed = (first + len(found)) * self._block_tokens
        return sequence.n_computed - before

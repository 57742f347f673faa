"""The state of one sequence in the engine: its tokens, pages, block hashes, and how much KV is valid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from libs.common.block_hash import HashChain, TokenArray
from libs.engine.kv.block_features import BlockFeatures
from libs.engine.kv.block_manager import BlockManager
from libs.engine.sampling.stop_conditions import cut_at_stop
from libs.engine.step.constraint import TokenConstraint
from libs.engine.step.device_rows import FeatureArray, join_rows, own_rows
from libs.engine.step.prompt_scores import scored_tokens
from libs.engine.step.step_model import SequenceRows, no_tokens
from libs.engine.step.types import (
    FEATURE_WINDOW_TOKENS,
    FinishReason,
    FullBlock,
    PageReservation,
    SequenceSpec,
)
from slipstream.errors import FailedPrecondition, OutOfPages


class SequenceState(Enum):
    RESERVED = "reserved"  # has pages, waits for fill and start
    PREFILLING = "prefilling"  # no token sampled yet
    DECODING = "decoding"  # one known token without KV
    FINISHED = "finished"  # keeps its pages until released
    FAILED = "failed"  # likewise


@dataclass(slots=True)
class FeatureRows:
    """Features not yet sent: rows of consecutive positions, at most the last FEATURE_WINDOW_TOKENS."""

    start: int = 0
    rows: FeatureArray | None = None

    def append(self, start: int, rows: FeatureArray) -> None:
        if self.rows is None or self.start + len(self.rows) != start:
            self.start, self.rows = start, rows
        else:
            self.rows = join_rows([self.rows, rows])
        surplus = len(self.rows) - FEATURE_WINDOW_TOKENS
        if surplus > 0:
            # A slice of a device's rows would keep the memory of the whole step.
            self.start, self.rows = self.start + surplus, own_rows(self.rows[surplus:])

    def span(self, start: int, n_rows: int) -> FeatureArray | None:
        """The rows of positions [start, start + n_rows); None unless all of them are there."""
        first = start - self.start
        if self.rows is None or first < 0 or first + n_rows > len(self.rows):
            return None
        return self.rows[first : first + n_rows]

    def pop(self) -> tuple[int, FeatureArray | None]:
        start, rows = self.start, self.rows
        self.start, self.rows = 0, None
        return start, rows


class EngineSequence:
    """tokens[:n_tokens] are known; KV is valid for the first n_computed of them."""

    def __init__(self, spec: SequenceSpec, hashes: Sequence[bytes], block_tokens: int) -> None:
        self.spec = spec
        self.state = SequenceState.RESERVED
        self.arrival = 0
        self.last_slice = 0
        self.waited_tokens = 0  # tokens computed for other prompts while this one waited
        self.pages: list[int] = []
        self.n_computed = 0
        self.n_received = 0  # KV of so many tokens is where steps read it, see Engine.receive
        self.n_tokens = spec.context_tokens
        self.finish: FinishReason | None = None  # set if the first token, passed to `start`, is the last
        self.hashes = list(hashes)  # hashes of leading full blocks
        self.n_committed_blocks = 0  # blocks [0, n) went through commit
        self.features = FeatureRows()
        self.wants_features = True
        self.constraint: TokenConstraint | None = None  # in the state after all tokens
        self._block_tokens = block_tokens
        self._buffer = np.empty(self.n_tokens + 64, dtype=np.uint32)
        self._buffer[: len(spec.prompt)] = spec.prompt
        self._buffer[len(spec.prompt) : self.n_tokens] = spec.emitted
        params = spec.sampling
        self._counts_outputs = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0
        )
        self._output_counts: dict[int, int] = {}
        self._count(spec.emitted)
        self._prompt_ids: npt.NDArray[np.int64] | None = None
        if params.repetition_penalty != 1.0:
            self._prompt_ids = np.unique(np.asarray(spec.prompt)).astype(np.int64)

    @property
    def tokens(self) -> TokenArray:
        return self._buffer[: self.n_tokens]

    @property
    def n_output(self) -> int:
        """The number of output tokens, those of earlier attempts included."""
        return self.n_tokens - len(self.spec.prompt)

    @property
    def scores_prompt(self) -> bool:
        """Whether it computes each row of its prompt, and so uses no cached block."""
        return self.spec.sampling.prompt_logprobs is not None

    @property
    def pending_tokens(self) -> int:
        return self.n_tokens - self.n_computed

    def tokens_after(self, start: int, n: int) -> TokenArray:
        """A copy of the `n` tokens that follow those at [start, start + n)."""
        return self.tokens[start + 1 : start + 1 + n].copy()

    def append(self, tokens: Sequence[int]) -> None:
        end = self.n_tokens + len(tokens)
        self._ensure(end)
        self._buffer[self.n_tokens : end] = tokens
        self.n_tokens = end
        self._count(tokens)
        if self.constraint is not None:
            self.constraint.advance(tokens)

    def next_row(self, ahead: int) -> SequenceRows:
        """The row after `ahead` tokens, 0 or 1, that a launched step samples. The unknown one counts as 0."""
        end = self.n_computed + ahead + 1
        self._ensure(end)
        self._buffer[self.n_tokens : end] = 0  # scratch, as drafts are
        return SequenceRows(
            seq_id=self.spec.seq_id,
            tokens=self._buffer[:end],
            pages=self.pages,
            n_rows=1,
            n_sampled=1,
            n_prompt=len(self.spec.prompt),
            first_index=self.n_output + ahead,
            params=self.spec.sampling,
            output_counts=self._output_counts,
            prompt_ids=self._prompt_ids,
            constraint=self.constraint,
        )

    def ends_within(self, n_tokens: int, *, max_context_tokens: int) -> bool:
        """Whether `n_tokens` more, at least 1, end the sequence by its limit, whatever tokens they are."""
        return (
            self.spec.prefill_only
            or self.n_output + n_tokens >= self.spec.sampling.max_tokens
            or self.n_tokens + n_tokens >= max_context_tokens
        )

    def rows(self, n_tokens: int, drafts: Sequence[int]) -> SequenceRows:
        """Rows of the next `n_tokens` known tokens, then of the drafts, which follow the last known token."""
        end = self.n_computed + n_tokens
        samples = end == self.n_tokens
        self._ensure(end + len(drafts))
        if drafts:
            self._buffer[end : end + len(drafts)] = drafts  # beyond n_tokens: scratch
        return SequenceRows(
            seq_id=self.spec.seq_id,
            tokens=self._buffer[: end + len(drafts)],
            pages=self.pages,
            n_rows=n_tokens + len(drafts),
            n_sampled=1 + len(drafts) if samples else 0,
            n_prompt=len(self.spec.prompt),
            first_index=self.n_output,
            params=self.spec.sampling,
            output_counts=self._output_counts,
            prompt_ids=self._prompt_ids,
            constraint=self.constraint,
            scored=self._scored(end) if self.scores_prompt else no_tokens(),
        )

    def _scored(self, end: int) -> TokenArray:
        return scored_tokens(self._buffer, start=self.n_computed, stop=end, n_prompt=len(self.spec.prompt))

    def full_block_hashes(self, n_blocks: int) -> list[bytes]:
        """Hashes of the first `n_blocks` blocks; computes those that are new."""
        known = len(self.hashes)
        if known < n_blocks:
            chain = HashChain(
                root=self.hashes[-1] if self.hashes else self.spec.root,
                salt=self.spec.salt,
                block_tokens=self._block_tokens,
            )
            fresh = self._buffer[known * self._block_tokens : n_blocks * self._block_tokens]
            self.hashes += chain.extend(fresh)
        return self.hashes[:n_blocks]

    def check_fill(self, n_tokens: int) -> None:
        """Raise FailedPrecondition where KV of the first `n_tokens` cannot be filled."""
        if not self.n_computed <= n_tokens <= self.n_tokens:
            raise FailedPrecondition(
                f"{self.spec.seq_id}: filled to {n_tokens}, outside [{self.n_computed}, {self.n_tokens}]"
            )

    def pages_until(self, n_tokens: int) -> list[int]:
        """The pages of the positions from `n_computed` to `n_tokens`."""
        return self.pages[self.n_computed // self._block_tokens : -(-n_tokens // self._block_tokens)]

    def exchange(self, pages: Sequence[int], blocks: BlockManager, *, leave: int) -> PageReservation:
        """Replace these pages by fresh ones, as `Engine.exchange`."""
        n_filled = -(-self.n_computed // self._block_tokens)
        if not set(pages) <= set(self.pages[n_filled:]):
            raise FailedPrecondition(f"{self.spec.seq_id}: some pages are filled or of another sequence")
        fresh = dict(zip(pages, blocks.reserve((), len(pages), leave=leave), strict=True))
        self.pages = [fresh.get(page, page) for page in self.pages]
        blocks.release(list(pages))
        return PageReservation(self.spec.seq_id, tuple(self.pages), self.n_computed)

    def grow(self, n_tokens: int, blocks: BlockManager) -> bool:
        """Allocate pages for KV of the first `n_tokens`. Returns False when none are left."""
        missing = -(-n_tokens // self._block_tokens) - len(self.pages)
        if missing > 0:
            try:
                self.pages += blocks.allocate(missing)
            except OutOfPages:
                return False
        return True

    def commit_blocks(self, n_tokens: int, blocks: BlockManager) -> tuple[FullBlock, ...]:
        """Make the blocks that are full by `n_tokens` findable by hash; returns those that are new."""
        first, n_full = self.n_committed_blocks, n_tokens // self._block_tokens
        if n_full <= first:
            return ()
        hashes = self.full_block_hashes(n_full)[first:]
        fresh = tuple(FullBlock(*pair) for pair in zip(hashes, self.pages[first:n_full], strict=True))
        for block in fresh:
            blocks.commit(block.page, block.hash)
        self.n_committed_blocks = n_full
        return fresh

    def restore_features(self, features: BlockFeatures) -> None:
        """Begin with the rows that are known of the filled blocks, so that a reused prefix has them, too."""
        n_blocks, rest = divmod(self.n_computed, self._block_tokens)
        if n_blocks and not rest:
            hashes = self.full_block_hashes(n_blocks)
            rows = features.newest(hashes, -(-FEATURE_WINDOW_TOKENS // self._block_tokens))
            if rows is not None:
                self.features.append(self.n_computed - len(rows), rows)

    def keep_features(self, first_block: int, features: BlockFeatures) -> None:
        """Keep the rows of the blocks from `first_block` on that are committed."""
        for block in range(first_block, self.n_committed_blocks):
            rows = self.features.span(block * self._block_tokens, self._block_tokens)
            if rows is not None:
                features.put(self.hashes[block], rows)

    def cut(
        self, tokens: Sequence[int], *, max_context_tokens: int
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """The new `tokens` up to the end of the sequence, and the reason of that end, if there is one."""
        return cut_at_stop(
            tokens,
            self.spec.sampling,
            n_output_tokens=self.n_output,
            n_tokens=self.n_tokens,
            max_context_tokens=max_context_tokens,
        )

    def _count(self, tokens: Sequence[int]) -> None:
        if self._counts_outputs:
            for token in tokens:
                self._output_counts[token] = self._output_counts.get(token, 0) + 1

    def _ensure(self, n_tokens: int) -> None:
        if n_tokens > len(self._buffer):
            grown = np.empty(max(n_tokens, 2 * len(self._buffer)), dtype=np.uint32)
            grown[: self.n_tokens] = self.tokens
            self._buffer = grown

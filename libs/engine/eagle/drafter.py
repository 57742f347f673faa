"""Drafts for many sequences: bounded contexts over one EAGLE-3 head.

Row i of a context is (feature of position i, token at i + 1), at position i. The newest row proposes the
token at i + 2. Further drafts chain on the head's own hidden state, and their rows are dropped: a context
keeps only rows with the target's features.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from libs.common.block_hash import TokenArray
from libs.engine.eagle.head import EagleHead, HeadInputs, join_inputs
from libs.engine.step.draft_head import ContextRows
from libs.engine.step.types import FEATURE_WINDOW_TOKENS, FloatArray
from slipstream.errors import InvalidArgument

MAX_DRAFTS = 16  # drafts of one proposal
_MAX_SEQUENCES = 1024


class DrafterEngine:
    """Contexts of many sequences. Synchronous, single-threaded, independent of the target's engine.

    Memory is bounded by `max_sequences` contexts of twice `window_tokens` rows. Beyond it the engine drops
    the least recently extended context, which costs its sequence only some drafts.
    """

    def __init__(
        self,
        head: EagleHead,
        *,
        window_tokens: int = FEATURE_WINDOW_TOKENS,
        max_sequences: int = _MAX_SEQUENCES,
    ) -> None:
        self._head = head
        self._window_tokens = window_tokens
        self._max_sequences = max_sequences
        self._contexts: OrderedDict[str, _Context] = OrderedDict()

    @property
    def feature_width(self) -> int:
        return self._head.config.hidden_size

    @property
    def digest(self) -> str:
        """Hex digest of the head's files."""
        return self._head.digest

    @property
    def sequences(self) -> int:
        return len(self._contexts)

    def extend(self, seq_id: str, start_position: int, next_tokens: TokenArray, features: FloatArray) -> None:
        """`extend_batch` of one."""
        self.extend_batch([ContextRows(seq_id, start_position, next_tokens, features)])

    @torch.inference_mode()
    def extend_batch(self, rows_of_all: Sequence[ContextRows]) -> None:
        """Add rows to their contexts, in order.

        They replace the rows that a context has from `start_position` on; a gap restarts the context. Raises
        InvalidArgument, before any change, when shapes or tokens do not fit the head.
        """
        for extension in rows_of_all:
            self._check(extension)
        kept = [e.last(self._window_tokens) for e in rows_of_all]
        if not kept:
            return
        features = torch.from_numpy(_joined([e.features for e in kept], np.float32))
        tokens = torch.from_numpy(_joined([e.next_tokens for e in kept], np.int64))
        positions = torch.cat([torch.arange(e.start_position, e.end_position) for e in kept])
        inputs, rows = self._head.project(features, tokens, positions)
        end = 0
        for extension in kept:
            start, end = end, end + len(extension.next_tokens)
            context = self._context(extension.seq_id)
            context.append(extension.start_position, rows.keys[start:end], rows.values[start:end])
            context.newest = inputs.row(end - 1)

    def base_tokens(self, seq_id: str) -> int:
        """The number of tokens (prompt and output) before a proposal; 0 for an unknown sequence."""
        context = self._contexts.get(seq_id)
        return context.end_position + 1 if context else 0

    @torch.inference_mode()
    def propose_batch(
        self, seq_ids: Sequence[str], n_drafts: int, *, min_confidence: float = 0.0
    ) -> dict[str, list[int]]:
        """Draft up to `n_drafts` tokens (at most MAX_DRAFTS) of each known sequence, greedily chained.

        A chain ends before the draft at which the product of the head's probabilities falls below
        `min_confidence`.
        """
        contexts = {s: self._contexts[s] for s in seq_ids if s in self._contexts}
        n_drafts = min(n_drafts, MAX_DRAFTS)
        if not contexts or n_drafts < 1:
            return {}
        drafts = self._chain(list(contexts.values()), n_drafts, min_confidence)
        return dict(zip(contexts, drafts, strict=True))

    def close(self, seq_id: str) -> None:
        """Remove the sequence's context. Idempotent."""
        self._contexts.pop(seq_id, None)

    def _context(self, seq_id: str) -> _Context:
        context = self._contexts.get(seq_id)
        if context is None:
            context = self._contexts[seq_id] = _Context(self._head, self._window_tokens)
        self._contexts.move_to_end(seq_id)
        while len(self._contexts) > self._max_sequences:
            self._contexts.popitem(last=False)
        return context

    def _chain(self, contexts: Sequence[_Context], n_drafts: int, min_confidence: float) -> list[list[int]]:
        """Draft by a chain, whose rows are temporary and follow each context's own rows."""
        drafts: list[list[int]] = [[] for _ in contexts]
        running, confidence = list(range(len(contexts))), [1.0] * len(contexts)
        inputs = join_inputs([c.newest_row() for c in contexts])
        for j in range(n_drafts):
            outputs = self._head.attend(inputs, [contexts[i].view(j) for i in running])
            hidden, tokens, likely = outputs.hidden, outputs.tokens, outputs.confidence.tolist()
            confidence = [whole * own for whole, own in zip(confidence, likely, strict=True)]
            kept = [at for at, whole in enumerate(confidence) if whole >= min_confidence]
            if len(kept) < len(running):
                hidden, tokens = hidden[kept], tokens[kept]
                running, confidence = [running[at] for at in kept], [confidence[at] for at in kept]
            for i, token in zip(running, tokens.tolist(), strict=True):
                drafts[i].append(token)
            if not running or j + 1 == n_drafts:
                break
            positions = torch.tensor([contexts[i].end_position + j for i in running])
            inputs, rows = self._head.project(hidden, tokens, positions)
            for at, i in enumerate(running):
                contexts[i].write_behind(j, rows.keys[at], rows.values[at])
        return drafts

    def _check(self, e: ContextRows) -> None:
        width = self._head.config.hidden_size
        if e.features.ndim != 2 or e.features.shape[1] != width or not len(e.features):
            raise InvalidArgument("features", f"expected [rows >= 1, {width}], got {list(e.features.shape)}")
        if len(e.next_tokens) != len(e.features):
            raise InvalidArgument("next_tokens", f"{len(e.next_tokens)} for {len(e.features)} rows")
        if e.start_position < 0:
            raise InvalidArgument("start_position", "is negative")
        if int(np.max(e.next_tokens)) >= self._head.config.vocab_size:
            raise InvalidArgument("next_tokens", "a token lies outside the vocabulary")
        if not np.isfinite(e.features).all():
            raise InvalidArgument("features", "not finite")


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """All rows as one writable array of `dtype`."""
    return np.concatenate(parts, dtype=dtype, casting="unsafe")


class _Context:
    """Keys and values of the last rows, up to one window, in buffers for two windows and a chain.

    Rows [first, first + n_rows) of the buffers are valid. At the end of the buffers they move to the front,
    so each row is copied at most once per window.
    """

    def __init__(self, head: EagleHead, window_tokens: int) -> None:
        attention, n_rows = head.attention, 2 * window_tokens + MAX_DRAFTS
        self._keys = torch.empty(attention.n_kv_heads, n_rows, attention.key_width)
        self._values = self._keys[..., : attention.value_width]
        if not attention.values_in_keys:
            self._values = torch.empty(attention.n_kv_heads, n_rows, attention.value_width)
        self._window_tokens = window_tokens
        self._first = 0
        self._n_rows = 0
        self.end_position = 0  # one past the newest row
        self.newest: HeadInputs | None = None

    def newest_row(self) -> HeadInputs:
        """The projection of the newest row; a context has one from its first rows on."""
        assert self.newest is not None
        return self.newest

    def view(self, n_behind: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, n, D] of the context's rows and `n_behind` chained ones."""
        rows = slice(self._first, self._first + self._n_rows + n_behind)
        return self._keys[:, rows], self._values[:, rows]

    def write_behind(self, index: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write chained row `index`, which the next `append` overwrites."""
        at = self._first + self._n_rows + index
        self._keys[:, at] = key
        self._values[:, at] = value

    def append(self, start_position: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the rows from start_position on with n new ones [n, kv_heads, D]; n <= window."""
        self._drop_from(start_position)
        n = len(keys)
        if self._first + self._n_rows + n > 2 * self._window_tokens:
            self._move_to_front(self._window_tokens - n)
        end = self._first + self._n_rows
        self._keys[:, end : end + n] = keys.transpose(0, 1)
        self._values[:, end : end + n] = values.transpose(0, 1)
        surplus = max(self._n_rows + n - self._window_tokens, 0)
        self._first += surplus
        self._n_rows += n - surplus
        self.end_position = start_position + n

    def _drop_from(self, position: int) -> None:
        start = self.end_position - self._n_rows
        if start <= position <= self.end_position:
            self._n_rows = position - start
        else:
            self._first = self._n_rows = 0

    def _move_to_front(self, n_rows: int) -> None:
        """Move the newest rows, at most `n_rows`, to the front and drop the others."""
        kept = min(self._n_rows, n_rows)
        newest = slice(self._first + self._n_rows - kept, self._first + self._n_rows)
        self._keys[:, :kept] = self._keys[:, newest].clone()
        self._values[:, :kept] = self._values[:, newest].clone()
        self._first, self._n_rows = 0, kept

"""Drafts for many sequences: bounded contexts over one head.

Row i of a context is (feature of position i, token at i + 1), at position i. The newest row proposes the
token at i + 2. Rows that a head writes for its drafts are dropped: a context keeps only rows with the
target's features.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from libs.common.block_hash import TokenArray
from libs.engine.eagle.context import DraftContext
from libs.engine.eagle.context_head import ContextHead
from libs.engine.eagle.head_memory import DRAFTER_CONTEXTS
from libs.engine.eagle.head_rows import MAX_DRAFTS
from libs.engine.kernels.device import upload
from libs.engine.step.device_rows import DeviceRows, FeatureArray, join_rows
from libs.engine.step.draft_head import ContextRows, HeadRows
from libs.engine.step.types import FEATURE_WINDOW_TOKENS
from slipstream.errors import InvalidArgument

MAX_SEQUENCES = DRAFTER_CONTEXTS


class DrafterEngine:
    """Contexts of many sequences. Synchronous, single-threaded, independent of the target's engine.

    Memory is bounded by `max_sequences` contexts of twice `window_tokens` rows. Beyond it the engine drops
    the least recently extended context, which costs its sequence only some drafts.
    """

    def __init__(
        self,
        head: ContextHead,
        *,
        window_tokens: int = FEATURE_WINDOW_TOKENS,
        max_sequences: int = MAX_SEQUENCES,
    ) -> None:
        self._head = head
        self._window_tokens = window_tokens
        self._max_sequences = max_sequences
        self._contexts: OrderedDict[str, DraftContext] = OrderedDict()

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

    def extend(
        self, seq_id: str, start_position: int, next_tokens: TokenArray, features: FeatureArray
    ) -> None:
        """`extend_batch` of one."""
        self.extend_batch([ContextRows(seq_id, start_position, next_tokens, features)])

    @torch.inference_mode()
    def extend_batch(self, rows_of_all: Sequence[HeadRows]) -> None:
        """Add rows to their contexts, in order.

        They replace the rows that a context has from `start_position` on; a gap restarts the context. Raises
        InvalidArgument, before any change, when shapes or tokens do not fit the head.
        """
        for piece in rows_of_all:
            self._check(piece)
        kept = [e.last(self._window_tokens) for e in rows_of_all]
        if not kept:
            return
        tokens = torch.from_numpy(_joined([e.next_tokens for e in kept], np.int64))
        positions = torch.cat([torch.arange(e.start_position, e.end_position) for e in kept])
        features, device = join_rows([e.features for e in kept]), self._head.device
        inputs, rows = self._head.project_rows(
            _placed(features, device), upload(tokens, device), upload(positions, device)
        )
        end = 0
        for piece in kept:
            start, end = end, end + len(piece.next_tokens)
            context = self._context(piece.seq_id, rows.keys)
            context.append(piece.start_position, rows.keys[start:end], rows.values[start:end])
            context.newest = None if inputs is None else inputs.row(end - 1)
            context.last_token = int(piece.next_tokens[-1])

    def base_tokens(self, seq_id: str) -> int:
        """The number of tokens (prompt and output) before a proposal; 0 for an unknown sequence."""
        context = self._contexts.get(seq_id)
        return context.end_position + 1 if context else 0

    @torch.inference_mode()
    def propose_batch(
        self, seq_ids: Sequence[str], n_drafts: int, *, min_confidence: float = 0.0
    ) -> dict[str, list[int]]:
        """Draft up to `n_drafts` tokens (at most MAX_DRAFTS) of each known sequence, greedily.

        Drafts end before the one at which the product of the head's probabilities falls below
        `min_confidence`.
        """
        contexts = {s: self._contexts[s] for s in seq_ids if s in self._contexts}
        n_drafts = min(n_drafts, MAX_DRAFTS)
        if not contexts or n_drafts < 1:
            return {}
        drafts: list[list[int]] = []
        running, most = list(contexts.values()), self._head.most_contexts
        for start in range(0, len(running), most):
            drafts += self._head.draft(running[start : start + most], n_drafts, min_confidence)
        return dict(zip(contexts, drafts, strict=True))

    def close(self, seq_id: str) -> None:
        """Remove the sequence's context. Idempotent."""
        self._contexts.pop(seq_id, None)

    def _context(self, seq_id: str, like: torch.Tensor) -> DraftContext:
        context = self._contexts.get(seq_id)
        if context is None:
            shape, is_padded = self._head.config.kv_shape, self._head.pads_contexts
            context = DraftContext(shape, self._window_tokens, like, is_padded=is_padded)
            self._contexts[seq_id] = context
        self._contexts.move_to_end(seq_id)
        while len(self._contexts) > self._max_sequences:
            self._contexts.popitem(last=False)
        return context

    def _check(self, e: HeadRows) -> None:
        width = self._head.config.hidden_size
        if e.features.ndim != 2 or e.features.shape[1] != width or not len(e.features):
            raise InvalidArgument("features", f"expected [rows >= 1, {width}], got {list(e.features.shape)}")
        if len(e.next_tokens) != len(e.features):
            raise InvalidArgument("next_tokens", f"{len(e.next_tokens)} for {len(e.features)} rows")
        if e.start_position < 0:
            raise InvalidArgument("start_position", "is negative")
        if int(np.max(e.next_tokens)) >= self._head.config.vocab_size:
            raise InvalidArgument("next_tokens", "a token lies outside the vocabulary")
        # Those of an engine on the device are not read here: the host would wait for them.
        if not isinstance(e.features, DeviceRows) and not np.isfinite(e.features).all():
            raise InvalidArgument("features", "not finite")


def _placed(features: FeatureArray, device: torch.device) -> torch.Tensor:
    if isinstance(features, DeviceRows):
        return features.tensor.to(device, torch.float32)
    return upload(torch.from_numpy(np.array(features, np.float32)), device)


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """All rows as one writable array of `dtype`."""
    return np.concatenate(parts, dtype=dtype, casting="unsafe")

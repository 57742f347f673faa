"""The rows that a head's queries attend to: those of its contexts, and rows that it writes behind them.

On a CPU each context is attended to by itself: contexts differ in length, and padded copies would cost more
than the loop. On a device a launch costs more than a copy, so contexts are padded into one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from libs.engine.eagle.context import DraftContext
from libs.engine.kernels.device import upload
from libs.engine.kernels.interface import Kernels

ALL_HEADS = slice(None)


class AttendedRows(Protocol):
    """Rows of S contexts, and R or more rows behind each. `heads`: the kv heads that are meant."""

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor, heads: slice = ALL_HEADS) -> None:
        """Write keys and values [S, R, n_kv_heads, width] of the rows from `index` on behind each context."""
        ...

    def mix(self, q: torch.Tensor, n_behind: int, *, scale: float, heads: slice = ALL_HEADS) -> torch.Tensor:
        """Attend from q [S, R, n_heads, key_width] to contexts and `n_behind` rows, not causal.

        Returns [S, R, n_heads, value_width].
        """
        ...


class LoopedRows:
    """Contexts in their own buffers, one after the other."""

    def __init__(self, contexts: Sequence[DraftContext]) -> None:
        self._contexts = contexts

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor, heads: slice = ALL_HEADS) -> None:
        """See `AttendedRows`."""
        for i, context in enumerate(self._contexts):
            context.write_behind(index, keys[i], values[i], heads)

    def mix(self, q: torch.Tensor, n_behind: int, *, scale: float, heads: slice = ALL_HEADS) -> torch.Tensor:
        """See `AttendedRows`."""
        contexts = [context.view(n_behind) for context in self._contexts]
        if heads is not ALL_HEADS:
            contexts = [(keys[heads], values[heads]) for keys, values in contexts]
        grouped = _by_kv_head(q, len(contexts[0][0]))
        mixed = [
            scaled_dot_product_attention(grouped[i : i + 1], keys[None], values[None], scale=scale)
            for i, (keys, values) in enumerate(contexts)
        ]
        return _by_row(mixed[0] if len(mixed) == 1 else torch.cat(mixed), q.shape[1])


class PaddedRows:
    """Copies of contexts in one buffer, as long as the longest, and room for rows behind them.

    What lies behind a shorter context is finite and masked. Nothing here waits for a device.
    """

    def __init__(self, contexts: Sequence[DraftContext], n_behind: int) -> None:
        self._length = max(context.n_rows for context in contexts)
        windows = [context.window(self._length) for context in contexts]
        visible = np.ones((len(contexts), 1, 1, self._length + n_behind), np.bool_)
        for row, context in zip(visible, contexts, strict=True):
            row[..., context.n_rows : self._length] = False
        self._keys = self._joined([keys for keys, _ in windows], n_behind)
        shape = contexts[0].shape
        self._values = self._keys[..., : shape.value_width]
        self._values_are_apart = not shape.values_in_keys
        if self._values_are_apart:
            self._values = self._joined([values for _, values in windows], n_behind)
        self._visible = upload(torch.from_numpy(visible), self._keys.device)

    def write(self, index: int, keys: torch.Tensor, values: torch.Tensor, heads: slice = ALL_HEADS) -> None:
        """See `AttendedRows`."""
        at = slice(self._length + index, self._length + index + keys.shape[1])
        self._keys[:, heads, at] = keys.transpose(1, 2)
        if self._values_are_apart:
            self._values[:, heads, at] = values.transpose(1, 2)

    def mix(self, q: torch.Tensor, n_behind: int, *, scale: float, heads: slice = ALL_HEADS) -> torch.Tensor:
        """See `AttendedRows`."""
        rows = slice(self._length + n_behind)
        keys, values = self._keys[:, heads, rows], self._values[:, heads, rows]
        grouped, visible = _by_kv_head(q, keys.shape[1]), self._visible[..., rows]
        mixed = scaled_dot_product_attention(grouped, keys, values, attn_mask=visible, scale=scale)
        return _by_row(mixed, q.shape[1])

    def _joined(self, parts: Sequence[torch.Tensor], n_behind: int) -> torch.Tensor:
        n_heads, _, width = parts[0].shape
        joined = parts[0].new_empty(len(parts), n_heads, self._length + n_behind, width)
        joined[:, :, : self._length] = torch.stack(list(parts))
        return joined


def attended_rows(contexts: Sequence[DraftContext], n_behind: int, kernels: Kernels) -> AttendedRows:
    """In the form that is quick with these kernels."""
    return PaddedRows(contexts, n_behind) if pads_contexts(kernels) else LoopedRows(contexts)


def pads_contexts(kernels: Kernels) -> bool:
    """Whether the kernels are a device's, whose launches cost more than padded copies."""
    return kernels.name == "triton"


def _by_kv_head(q: torch.Tensor, n_kv_heads: int) -> torch.Tensor:
    """[S, R, n_heads, D] -> [S, kv, R * group, D]: all rows see the same keys."""
    n_sequences, n_rows, n_heads, width = q.shape
    by_kv = q.reshape(n_sequences, n_rows, n_kv_heads, n_heads // n_kv_heads, width)
    if n_rows == 1:
        return by_kv[:, 0]
    return by_kv.transpose(1, 2).flatten(2, 3)


def _by_row(mixed: torch.Tensor, n_rows: int) -> torch.Tensor:
    """[S, kv, R * group, E] -> [S, R, n_heads, E]."""
    n_sequences, n_kv_heads, _, width = mixed.shape
    if n_rows == 1:
        return mixed.reshape(n_sequences, 1, -1, width)
    split = mixed.view(n_sequences, n_kv_heads, n_rows, -1, width)
    return split.transpose(1, 2).flatten(2, 3)

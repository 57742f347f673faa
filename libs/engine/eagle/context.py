"""The context of one sequence at a draft head: keys and values of its last rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from libs.engine.eagle.head_rows import KvShape, context_rows


@dataclass(frozen=True, slots=True)
class HeadInputs:
    """The inputs of `attend` for rows: residuals [T, H] and queries [T, n_heads, key_width]."""

    residual: torch.Tensor
    q: torch.Tensor

    def row(self, index: int) -> HeadInputs:
        """Row `index` alone, in memory that nothing else shares."""
        at = slice(index, index + 1)
        return HeadInputs(self.residual[at].clone(), self.q[at].clone())


def join_inputs(inputs: Sequence[HeadInputs]) -> HeadInputs:
    """The rows of all, in order."""
    if len(inputs) == 1:
        return inputs[0]
    return HeadInputs(torch.cat([i.residual for i in inputs]), torch.cat([i.q for i in inputs]))


class DraftContext:
    """Keys and values of the last rows, up to one window, in buffers for two windows and rows of drafts.

    Rows [first, first + n_rows) of the buffers are valid. At the end of the buffers they
    move to the front, so each row is copied at most once per window.
    """

    def __init__(
        self, shape: KvShape, window_tokens: int, like: torch.Tensor, *, is_padded: bool = False
    ) -> None:
        """`like`: a tensor whose dtype and device the buffers take.

        `is_padded`: readers may read rows that are not valid, which then are finite. Otherwise the memory of
        rows that are never written stays untouched.
        """
        n_rows = context_rows(window_tokens)
        self.shape = shape
        new = like.new_zeros if is_padded else like.new_empty
        self._keys = new((shape.n_kv_heads, n_rows, shape.key_width))
        self._values = self._keys[..., : shape.value_width]
        if not shape.values_in_keys:
            self._values = new((shape.n_kv_heads, n_rows, shape.value_width))
        self._window_tokens = window_tokens
        self._first = 0
        self.n_rows = 0
        self.end_position = 0  # one past the newest row
        self.newest: HeadInputs | None = None  # of the newest row, for heads that chain
        self.last_token = 0  # the token after the newest row

    def newest_row(self) -> HeadInputs:
        """The projection of the newest row; a context has one from its first rows on."""
        assert self.newest is not None
        return self.newest

    def view(self, n_behind: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [kv_heads, n, D] of the context's rows and `n_behind` chained ones."""
        rows = slice(self._first, self._first + self.n_rows + n_behind)
        return self._keys[:, rows], self._values[:, rows]

    def window(self, n_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `n_rows` rows of the buffers, at most one window: first the context's own.

        They begin in the first window, so the second one holds the rest.
        """
        rows = slice(self._first, self._first + n_rows)
        return self._keys[:, rows], self._values[:, rows]

    def write_behind(self, index: int, keys: torch.Tensor, values: torch.Tensor, heads: slice) -> None:
        """Write rows [n, kv_heads, D] from `index` on behind the context, until the next `append`."""
        start = self._first + self.n_rows + index
        rows = slice(start, start + len(keys))
        self._keys[heads, rows] = keys.transpose(0, 1)
        if not self.shape.values_in_keys:
            self._values[heads, rows] = values.transpose(0, 1)

    def append(self, start_position: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Replace the rows from start_position on with n new ones [n, kv_heads, D]; n <= window."""
        self._drop_from(start_position)
        n = len(keys)
        if self._first + self.n_rows + n > 2 * self._window_tokens:
            self._move_to_front(self._window_tokens - n)
        end = self._first + self.n_rows
        self._keys[:, end : end + n] = keys.transpose(0, 1)
        self._values[:, end : end + n] = values.transpose(0, 1)
        surplus = max(self.n_rows + n - self._window_tokens, 0)
        self._first += surplus
        self.n_rows += n - surplus
        self.end_position = start_position + n

    def _drop_from(self, position: int) -> None:
        start = self.end_position - self.n_rows
        if start <= position <= self.end_position:
            self.n_rows = position - start
        else:
            self._first = self.n_rows = 0

    def _move_to_front(self, n_rows: int) -> None:
        """Move the newest rows, at most `n_rows`, to the front and drop the others."""
        kept = min(self.n_rows, n_rows)
        newest = slice(self._first + self.n_rows - kept, self._first + self.n_rows)
        self._keys[:, :kept] = self._keys[:, newest].clone()
        self._values[:, :kept] = self._values[:, newest].clone()
        self._first, self.n_rows = 0, kept

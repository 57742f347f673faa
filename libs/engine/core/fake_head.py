"""A draft head without a model, to run services without torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from libs.engine.step.draft_head import HeadRows


class FakeHead:
    """Guesses from the last token alone."""

    def __init__(
        self,
        *,
        feature_width: int = 8,
        digest: str = "fake-head",
        guess: Callable[[int], int] = lambda token: token,
    ) -> None:
        self.feature_width = feature_width
        self.digest = digest
        self._guess = guess
        self._last: dict[str, int] = {}

    @property
    def sequences(self) -> int:
        return len(self._last)

    def extend_batch(self, rows: Sequence[HeadRows]) -> None:
        for r in rows:
            self._last[r.seq_id] = int(r.next_tokens[-1])

    def propose_batch(
        self, seq_ids: Sequence[str], n_drafts: int, *, min_confidence: float = 0.0
    ) -> dict[str, list[int]]:
        return {
            seq_id: self._chain(self._last[seq_id], n_drafts) for seq_id in seq_ids if seq_id in self._last
        }

    def close(self, seq_id: str) -> None:
        self._last.pop(seq_id, None)

    def _chain(self, token: int, n_drafts: int) -> list[int]:
        tokens = []
        for _ in range(n_drafts):
            token = self._guess(token)
            tokens.append(token)
        return tokens

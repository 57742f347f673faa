"""What the service needs of a draft head, and the two that there are. No torch unless a head is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from libs.common.block_hash import TokenArray
from libs.engine.step.types import FloatArray


@dataclass(frozen=True, slots=True)
class ContextRows:
    """Committed rows of one sequence: row i is (feature of position i, token at i + 1)."""

    seq_id: str
    start_position: int
    next_tokens: TokenArray  # [n >= 1]
    features: FloatArray  # [n, width]

    @property
    def base_tokens(self) -> int:
        """Committed length once they are known."""
        return self.start_position + len(self.next_tokens) + 1


class DraftHead(Protocol):
    """Contexts of many sequences over one head. Synchronous; every call comes from one thread."""

    @property
    def feature_width(self) -> int: ...

    @property
    def digest(self) -> str:
        """Hex digest of the head's files: the `drafter` part of the fingerprint."""
        ...

    @property
    def sequences(self) -> int:
        """Contexts held."""
        ...

    def extend(self, rows: Sequence[ContextRows]) -> None:
        """Take rows in, in order. Raises InvalidArgument, before anything changes, when some do not fit."""
        ...

    def propose(self, seq_ids: Sequence[str], n_drafts: int) -> dict[str, list[int]]:
        """The next tokens of each; unknown sequences are left out."""
        ...

    def close(self, seq_id: str) -> None:
        """Drop the sequence's context. Idempotent."""
        ...


def load_eagle_head(head_dir: Path, target_dir: Path) -> DraftHead:
    """The EAGLE-3 head in `head_dir` for the target model in `target_dir`."""
    from libs.engine.core.build import build_drafter
    from libs.engine.eagle.drafter import Extension

    class Eagle:
        def __init__(self) -> None:
            self._engine = build_drafter(head_dir, target_dir)
            self.feature_width = self._engine.feature_width
            self.digest = self._engine.digest

        @property
        def sequences(self) -> int:
            return self._engine.sequences

        def extend(self, rows: Sequence[ContextRows]) -> None:
            self._engine.extend_batch(
                [Extension(r.seq_id, r.start_position, r.next_tokens, r.features) for r in rows]
            )

        def propose(self, seq_ids: Sequence[str], n_drafts: int) -> dict[str, list[int]]:
            return self._engine.propose_batch(seq_ids, n_drafts)

        def close(self, seq_id: str) -> None:
            self._engine.close(seq_id)

    return Eagle()


class FakeHead:
    """A head without a model, to run the service without torch: guesses from the last token alone."""

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

    def extend(self, rows: Sequence[ContextRows]) -> None:
        for r in rows:
            self._last[r.seq_id] = int(r.next_tokens[-1])

    def propose(self, seq_ids: Sequence[str], n_drafts: int) -> dict[str, list[int]]:
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

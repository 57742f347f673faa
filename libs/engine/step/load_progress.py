"""How far a model is loaded. The thread that loads writes it, and any thread reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class LoadProgress:
    """Bytes of the weights as they are stored. `total_bytes` is 0 until the checkpoint's headers are read.

    Then decode steps are captured, in so many buckets, where a device runs them as graphs.
    """

    done_bytes: int = 0
    total_bytes: int = 0
    done_captures: int = 0
    total_captures: int = 0

    def note_captures(self, n_done: int, n_all: int) -> None:
        self.done_captures, self.total_captures = n_done, n_all

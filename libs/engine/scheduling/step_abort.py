"""Abort the step in progress when most of its rows belong to cancelled sequences.

A cancel must not wait for a step of hundreds of rows. An aborted step changes no sequence; the sequences that
still run compute the same rows again. That wastes their work, so only a majority of cancelled rows aborts a
step, and only MAX_CONSECUTIVE_ABORTS times in a row.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from libs.engine.step.stop_flag import StopFlag

MAX_CONSECUTIVE_ABORTS = 2


def should_abort(rows: Mapping[str, int], unwanted: Collection[str], *, consecutive_aborts: int) -> bool:
    """Whether to abort a step with these `rows` per sequence. Pure.

    `consecutive_aborts`: aborted steps with wanted rows since the last step that was computed to its end.
    """
    wasted = sum(n for seq_id, n in rows.items() if seq_id in unwanted)
    wanted = sum(rows.values()) - wasted
    if not wanted:
        return wasted > 0
    return wasted > wanted and consecutive_aborts < MAX_CONSECUTIVE_ABORTS


class StepAbort:
    """The cancelled sequences, the running rows, and the flag that aborts them.

    Any thread may call `abandon`; only the engine's thread calls the other methods.
    """

    def __init__(self) -> None:
        self.flag = StopFlag()
        self._lock = threading.Lock()  # so that a flag aborts no later step
        self._unwanted: set[str] = set()
        self._rows: Mapping[str, int] = {}
        self._consecutive_aborts = 0
        self.n_aborted = 0  # steps

    def abandon(self, seq_id: str) -> None:
        """Mark the sequence as cancelled; `remove` must follow when it is released."""
        with self._lock:
            self._unwanted.add(seq_id)
            self._abort_if_wasted()

    def is_running(self, seq_id: str) -> bool:
        """Whether the step in progress has rows of the sequence."""
        with self._lock:
            return seq_id in self._rows

    def remove(self, seq_id: str) -> None:
        """Remove the mark of a released sequence, whose id may be used again."""
        with self._lock:
            self._unwanted.discard(seq_id)

    def begin(self, rows: Mapping[str, int]) -> None:
        """Begin a step with these rows per sequence."""
        with self._lock:
            self._rows = rows
            self._abort_if_wasted()

    def end(self, *, aborted: bool) -> None:
        """End the step."""
        with self._lock:
            self.n_aborted += aborted
            if not aborted:
                self._consecutive_aborts = 0
            elif not self._rows.keys() <= self._unwanted:
                self._consecutive_aborts += 1
            self._rows = {}
            self.flag.clear()

    def _abort_if_wasted(self) -> None:
        if should_abort(self._rows, self._unwanted, consecutive_aborts=self._consecutive_aborts):
            self.flag.set()

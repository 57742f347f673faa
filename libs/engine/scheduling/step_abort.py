"""When the step in progress is cut short because sequences of it are not wanted any more.

A cancel cannot wait for a step of hundreds of rows. A step that is cut has changed nothing that counts: its
sequences are as before, and those still wanted run the same rows again. That costs them what was computed,
so a step is cut only for the majority of its rows, and only so often in a row.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping

from libs.engine.step.stop_flag import StopFlag

MAX_CUTS_IN_ROW = 2


def pays_to_cut(rows: Mapping[str, int], unwanted: Collection[str], *, cuts_in_row: int) -> bool:
    """Whether to cut a step of so many `rows` by sequence.

    `cuts_in_row`: steps with wanted rows that were cut since one was last computed to its end. Pure.
    """
    wasted = sum(n for seq_id, n in rows.items() if seq_id in unwanted)
    wanted = sum(rows.values()) - wasted
    if not wanted:
        return wasted > 0
    return wasted > wanted and cuts_in_row < MAX_CUTS_IN_ROW


class StepAbort:
    """Who is not wanted, what runs now, and the flag that ends it. `abandon` is for any thread, the rest for
    the engine's."""

    def __init__(self) -> None:
        self.flag = StopFlag()
        self._lock = threading.Lock()  # so that a flag never meets another step than the one it was set for
        self._unwanted: set[str] = set()
        self._rows: Mapping[str, int] = {}
        self._cuts_in_row = 0
        self.cuts = 0  # steps that were cut

    def abandon(self, seq_id: str) -> None:
        """Nobody wants the sequence any more; `forget` must follow, with its release."""
        with self._lock:
            self._unwanted.add(seq_id)
            self._judge()

    def runs(self, seq_id: str) -> bool:
        """Whether the step in progress has rows of the sequence."""
        with self._lock:
            return seq_id in self._rows

    def forget(self, seq_id: str) -> None:
        """The sequence was released; its name may be used again."""
        with self._lock:
            self._unwanted.discard(seq_id)

    def begin(self, rows: Mapping[str, int]) -> None:
        """A step of so many rows by sequence begins."""
        with self._lock:
            self._rows = rows
            self._judge()

    def end(self, *, was_cut: bool) -> None:
        """It has ended, by whatever cause."""
        with self._lock:
            self.cuts += was_cut
            if not was_cut:
                self._cuts_in_row = 0
            elif not self._rows.keys() <= self._unwanted:
                self._cuts_in_row += 1
            self._rows = {}
            self.flag.clear()

    def _judge(self) -> None:
        if pays_to_cut(self._rows, self._unwanted, cuts_in_row=self._cuts_in_row):
            self.flag.set()

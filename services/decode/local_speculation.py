"""Drafts from a head in this process: it runs on the engine's thread, between two steps."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from libs.engine.step.device_rows import join_rows as join_features
from libs.engine.step.draft_head import ContextRows, DraftHead, HeadRows
from libs.engine.step.types import FEATURE_WINDOW_TOKENS, StepOutput
from libs.worker.process.warm_up import warm_up_head
from libs.worker.requests.messages import Features, float_features
from services.decode.draft_control import DraftControl
from services.decode.draft_gate import DraftGate, DraftMode

log = logging.getLogger(__name__)

# More rows than a step can commit: the head takes in a prompt, or what it missed while drafts were off.
_CATCH_UP_ROWS = 16


class LocalSpeculation:
    """Implements `Speculation`. `load` makes the head, on the engine's thread; before it there are no drafts.

    A head that raises is given up: decoding goes on without drafts.
    """

    drafts_due = 0
    drafts_missed = 0

    def __init__(
        self,
        *,
        draft_tokens: int,
        gate: DraftGate | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._draft_tokens = draft_tokens
        self._control = DraftControl(gate, lambda: clock() * 1e3)
        self._clock = clock
        self._head: DraftHead | None = None
        self._lock = threading.Lock()
        # Rows that the head lacks, by sequence, in order and without a gap.
        self._rows: dict[str, list[HeadRows]] = {}
        self._closed: list[str] = []

    def load(self, head: DraftHead) -> None:
        """Use this head from now on."""
        warm_up_head(head)
        self._head = head

    # ---- on the event loop

    def start(self) -> None:
        """See `Speculation`."""

    async def close(self) -> None:
        """See `Speculation`."""

    def prompt_rows(self, context_tokens: int) -> int:
        """See `Speculation`."""
        with self._lock:
            return self._control.prompt_rows(context_tokens) if self._head is not None else 0

    def open(self, seq_id: str, rows: ContextRows[Features] | None = None) -> None:
        """See `Speculation`."""
        with self._lock:
            self._rows[seq_id] = kept = list[HeadRows]()
            if rows is not None:
                features = float_features(rows.features)
                kept.append(ContextRows(seq_id, rows.start_position, rows.next_tokens, features))
            n_rows, end = (0, 0) if rows is None else (len(rows.next_tokens), rows.end_position)
            self._control.open(seq_id, n_rows=n_rows, context_tokens=end)

    def end(self, seq_id: str) -> int:
        """See `Speculation`; no answer can be late."""
        with self._lock:
            self._close(seq_id)
        return 0

    # ---- on the engine's thread

    @property
    def wants_features(self) -> bool:
        """Whether the head will need the next step's rows."""
        return self._control.mode is not DraftMode.OFF

    def drafts(self) -> Mapping[str, Sequence[int]]:
        """Take in what was committed, and draft."""
        head = self._head
        with self._lock:
            if self._control.is_resting:
                return {}
            mode = self._control.begin(available=head is not None)
            closed, self._closed = self._closed, []
            rows: dict[str, list[HeadRows]] = {}
            if mode is DraftMode.ON:
                rows = {seq_id: pieces for seq_id, pieces in self._rows.items() if pieces}
                self._rows.update((seq_id, []) for seq_id in rows)
        if head is None:
            return {}
        try:
            for seq_id in closed:
                head.close(seq_id)
            return self._drafts(head, [join_rows(pieces) for pieces in rows.values()])
        except Exception:
            log.exception("the draft head is given up")
            self._head = None
            return {}

    def stepped(self, outputs: Sequence[StepOutput]) -> None:
        """Keep what was committed for the head."""
        with self._lock:
            if self._control.rests_on():
                return
            has_ends = self._control.end(outputs, self._control.count_drafts(outputs))
            if self._control.mode is DraftMode.OFF and not has_ends and not any(self._rows.values()):
                self._control.rest()
                return
            for output in outputs:
                if output.finish is not None or output.failure is not None:
                    self._close(output.seq_id)
                elif output.features is not None and output.feature_tokens is not None:
                    rows = ContextRows(
                        output.seq_id, output.feature_start, output.feature_tokens, output.features
                    )
                    self._keep(rows)
                elif output.tokens and (pieces := self._rows.get(output.seq_id)):
                    pieces.clear()  # the head's context has a gap now

    def _drafts(self, head: DraftHead, rows: Sequence[HeadRows]) -> Mapping[str, Sequence[int]]:
        """Drafts of the sequences whose newest position came with the last step."""
        setups = [r for r in rows if len(r.next_tokens) > _CATCH_UP_ROWS]
        if setups:
            began_s = self._clock()
            head.extend_batch(setups)
            with self._lock:
                self._control.add_setup([r.seq_id for r in setups], (self._clock() - began_s) * 1e3)
        steps = [r for r in rows if len(r.next_tokens) <= _CATCH_UP_ROWS]
        if steps:
            head.extend_batch(steps)
        if not rows:
            return {}
        proposed = head.propose_batch(
            [r.seq_id for r in rows], self._draft_tokens, min_confidence=self._control.least_confidence()
        )
        return {seq_id: tokens for seq_id, tokens in proposed.items() if tokens}

    # ---- under the lock

    def _keep(self, rows: HeadRows) -> None:
        pieces = self._rows.get(rows.seq_id)
        if pieces is None:
            return
        if pieces and pieces[-1].end_position != rows.start_position:
            pieces.clear()
        pieces.append(rows)
        while sum(len(piece.next_tokens) for piece in pieces[1:]) >= FEATURE_WINDOW_TOKENS:
            del pieces[0]

    def _close(self, seq_id: str) -> None:
        self._control.close(seq_id)
        if self._rows.pop(seq_id, None) is not None:
            self._closed.append(seq_id)


def join_rows(pieces: Sequence[HeadRows]) -> HeadRows:
    """Consecutive pieces of one sequence as one, with the last FEATURE_WINDOW_TOKENS rows."""
    if len(pieces) == 1:
        return pieces[0].last(FEATURE_WINDOW_TOKENS)
    whole = ContextRows(
        pieces[0].seq_id,
        pieces[0].start_position,
        np.concatenate([piece.next_tokens for piece in pieces]),
        join_features([piece.features for piece in pieces]),
    )
    return whole.last(FEATURE_WINDOW_TOKENS)

"""The state of the exchange with the drafter, and how long a step may wait for it. Pure; time is given.

Rows of a sequence wait in `pending` until they are sent; only the last FEATURE_WINDOW_TOKENS of them
are kept. A request is `in flight` until all its sequences were answered. At most `max_in_flight`
requests are: while a drafter is slow, rows of several steps join one request.
A proposal counts only if it follows the sequence's committed length of this moment.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from libs.common.block_hash import TokenArray
from libs.common.telemetry.tracing import TraceMetadata
from libs.common.worker_bounds import MAX_DRAFT_MESSAGE_BYTES
from libs.engine.step.draft_head import ContextRows
from libs.engine.step.types import FEATURE_WINDOW_TOKENS
from libs.worker.requests.messages import FEATURE_BYTES, Features, bfloat16_features

_RTT_WEIGHT = 0.2  # of a new sample in the running means
_DEVIATIONS = 4.0


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """A step waits for the recent round trip and four times its mean deviation (as TCP does before it
    sends again), but at least `wait_floor_ms` and never more than `wait_cap_ms`.
    """

    draft_tokens: int = 3
    wait_floor_ms: float = 2.0
    wait_cap_ms: float = 25.0
    max_in_flight: int = 4
    patience_ms: float = 100.0  # an answer overdue by this means: do not wait for this drafter


@dataclass(frozen=True, slots=True)
class DraftMessage:
    """One request to the drafter; `draft_tokens` may be 0: only extend."""

    rows: tuple[ContextRows[Features], ...]
    traces: tuple[TraceMetadata, ...]  # of the sequences of `rows`, in their order
    closed: tuple[str, ...]
    draft_tokens: int
    min_confidence: float = 0.0  # see DraftHead.propose_batch


@dataclass(slots=True)
class _InFlight:
    sent_ms: float
    bases: dict[str, int]


@dataclass(slots=True)
class _Pending:
    """Consecutive rows in the pieces they came in; joined only when they are sent."""

    start: int
    pieces: collections.deque[tuple[TokenArray, Features]] = field(default_factory=collections.deque)
    n_rows: int = 0

    @property
    def end(self) -> int:
        return self.start + self.n_rows

    @property
    def n_bytes(self) -> int:
        """Bytes of the rows on their way."""
        width: int = self.pieces[0][1].shape[1]
        return min(self.n_rows, FEATURE_WINDOW_TOKENS) * width * FEATURE_BYTES

    def append(self, tokens: TokenArray, features: Features) -> None:
        self.pieces.append((tokens, features))
        self.n_rows += len(tokens)
        while self.n_rows - len(self.pieces[0][0]) >= FEATURE_WINDOW_TOKENS:
            dropped = len(self.pieces.popleft()[0])
            self.start += dropped
            self.n_rows -= dropped

    def join(self, seq_id: str) -> ContextRows[Features]:
        tokens = np.concatenate([piece[0] for piece in self.pieces])
        features = _joined([piece[1] for piece in self.pieces])
        return ContextRows(seq_id, self.start, tokens, features).last(FEATURE_WINDOW_TOKENS)


@dataclass(slots=True)
class _Sequence:
    trace: TraceMetadata = ()
    base_tokens: int = 0
    pending: _Pending | None = None
    is_known: bool = False  # the drafter has rows of it
    wanted: bool = False  # a proposal for the base of this moment may still come
    proposal: tuple[int, ...] | None = None


@dataclass(slots=True)
class DraftState:
    """Bookkeeping of one decode worker's draft stream. Not thread-safe."""

    limits: DraftLimits = field(default_factory=DraftLimits)
    connected: bool = False
    paused: bool = False  # drafts do not pay now: nothing is asked for, rows wait
    min_confidence: float = 0.0  # of the drafts that are asked for
    round_trip_ms: float | None = None
    deviation_ms: float = 0.0
    _sequences: dict[str, _Sequence] = field(default_factory=dict)
    _closed: list[str] = field(default_factory=list)
    _in_flight: collections.deque[_InFlight] = field(default_factory=collections.deque)

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._sequences

    def open(self, seq_id: str, *, trace: TraceMetadata = ()) -> None:
        """The sequence needs drafts from now on. `trace`: its trace context."""
        self._sequences.setdefault(seq_id, _Sequence(trace))

    def close(self, seq_id: str) -> None:
        """The sequence ended. Idempotent. The drafter hears of it only if it has rows of it."""
        sequence = self._sequences.pop(seq_id, None)
        if sequence is not None and sequence.is_known:
            self._closed.append(seq_id)

    def extend(self, seq_id: str, start: int, tokens: TokenArray, features: Features) -> None:
        """Committed rows; they make every earlier proposal stale. Unknown sequences are fine."""
        sequence = self._sequences.get(seq_id)
        if sequence is None or not len(tokens):
            return
        if sequence.pending is None or sequence.pending.end != start:
            sequence.pending = _Pending(start)
        sequence.pending.append(tokens, features)
        sequence.base_tokens = start + len(tokens) + 1
        sequence.wanted, sequence.proposal = self.drafting, None

    def skip(self, seq_id: str) -> None:
        """The sequence advanced without features: what waits for it no longer follows on."""
        sequence = self._sequences.get(seq_id)
        if sequence is not None:
            sequence.pending, sequence.wanted, sequence.proposal = None, False, None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is there to send, to ask for or to skip."""
        if self._closed and self.connected:
            return False
        for sequence in self._sequences.values():
            if sequence.pending is not None or sequence.wanted or sequence.proposal is not None:
                return False
        return True

    @property
    def drafting(self) -> bool:
        """Whether proposals are asked for at all."""
        return self.connected and not self.paused and bool(self._sequences)

    @property
    def has_message(self) -> bool:
        """Whether `pop_message` may have one."""
        if not self.connected:
            return False
        return bool(self._closed) or (
            not self.paused and any(s.pending is not None for s in self._sequences.values())
        )

    def pop_message(self, now_ms: float) -> DraftMessage | None:
        """The message to send now; None if none waits, no drafter is connected, or too much is in flight."""
        if not self.connected or len(self._in_flight) >= self.limits.max_in_flight:
            return None
        rows = self._pop_rows() if not self.paused else ()
        if not rows and not self._closed:
            return None
        traces = tuple(self._sequences[r.seq_id].trace for r in rows)
        closed, self._closed = tuple(self._closed), []
        if rows:
            self._in_flight.append(_InFlight(now_ms, {r.seq_id: r.base_tokens for r in rows}))
        n_drafts = self.limits.draft_tokens if self.drafting else 0
        return DraftMessage(rows, traces, closed, n_drafts, self.min_confidence)

    def _pop_rows(self) -> tuple[ContextRows[Features], ...]:
        """The rows that wait, or as many sequences of them as one message is about."""
        rows: list[ContextRows[Features]] = []
        n_bytes = 0
        for seq_id, sequence in self._sequences.items():
            pending = sequence.pending
            if pending is None or (rows and n_bytes + pending.n_bytes > MAX_DRAFT_MESSAGE_BYTES):
                continue
            n_bytes += pending.n_bytes
            rows.append(pending.join(seq_id))
            sequence.pending, sequence.is_known = None, True
        return tuple(rows)

    def answer(self, seq_id: str, base_tokens: int, tokens: Sequence[int], now_ms: float) -> None:
        """A proposal came; it is kept when it is for the sequence's length of this moment."""
        sent_ms = self._remove_answered(seq_id, base_tokens)
        if sent_ms is not None:
            self._measure(max(now_ms - sent_ms, 0.0))
        sequence = self._sequences.get(seq_id)
        if sequence is not None and sequence.pending is None and base_tokens == sequence.base_tokens:
            sequence.wanted = False
            sequence.proposal = tuple(tokens)

    def connect(self) -> None:
        """A drafter is connected; it has no context yet."""
        self.disconnect()
        self.connected = True

    def disconnect(self) -> None:
        """The drafter is gone: no step waits for it."""
        self.connected = False
        self.round_trip_ms = None
        self._in_flight.clear()
        self._closed.clear()
        for sequence in self._sequences.values():
            sequence.is_known, sequence.wanted, sequence.proposal = False, False, None

    def wait_ms(self, now_ms: float) -> float:
        """How long a step that begins now may wait for `complete`; 0 = not at all."""
        if not self.drafting or self.round_trip_ms is None or self.complete:
            return 0.0
        if self._in_flight and now_ms - self._in_flight[0].sent_ms > self.limits.patience_ms:
            return 0.0
        expected_ms = self.round_trip_ms + _DEVIATIONS * self.deviation_ms
        return min(max(expected_ms, self.limits.wait_floor_ms), self.limits.wait_cap_ms)

    @property
    def complete(self) -> bool:
        """Whether every proposal that may come has come."""
        return not any(sequence.wanted for sequence in self._sequences.values())

    def pause(self, paused: bool) -> None:
        """Stop requesting drafts, or resume: proposals for the rows that waited may come in this step."""
        if paused is self.paused:
            return
        self.paused = paused
        for sequence in self._sequences.values():
            sequence.wanted, sequence.proposal = self.drafting and sequence.pending is not None, None

    def step_drafts(self) -> tuple[Mapping[str, Sequence[int]], tuple[str, ...]]:
        """(proposals for the step that begins now, sequences whose proposal did not come in time)."""
        drafts = {i: s.proposal for i, s in self._sequences.items() if s.proposal}
        missed = tuple(i for i, s in self._sequences.items() if s.wanted)
        return drafts, missed

    def _measure(self, round_trip_ms: float) -> None:
        if self.round_trip_ms is None:
            self.round_trip_ms, self.deviation_ms = round_trip_ms, round_trip_ms / 2
            return
        error = round_trip_ms - self.round_trip_ms
        self.round_trip_ms += _RTT_WEIGHT * error
        self.deviation_ms += _RTT_WEIGHT * (abs(error) - self.deviation_ms)

    def _remove_answered(self, seq_id: str, base_tokens: int) -> float | None:
        """Remove the sequence from requests in flight up to the one for `base_tokens`.

        Returns when that one was sent. A request without sequences is done. Closed sequences stay until
        they are answered: their answers measure the round trip too.
        """
        sent_ms = None
        for request in self._in_flight:
            known = request.bases.get(seq_id)
            if known is None or known > base_tokens:
                continue
            del request.bases[seq_id]
            if known == base_tokens:
                sent_ms = request.sent_ms
        self._in_flight = collections.deque(r for r in self._in_flight if r.bases)
        return sent_ms


def _joined(pieces: Sequence[Features]) -> Features:
    """The rows of all pieces; in bfloat16 where some have that form."""
    runs = [list(run) for _, run in itertools.groupby(pieces, key=lambda piece: piece.dtype)]
    joined: list[Features] = [np.concatenate(run) for run in runs]  # type: ignore[misc]
    return joined[0] if len(joined) == 1 else np.concatenate([bfloat16_features(part) for part in joined])

"""A bounded timeline of one request while it runs, with its placements and its tokens.

A timeline has no text of a prompt or an answer and no key. Its writers are the hooks of `execution`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol

import msgspec

from services.router.placement.types import PlacementDecision
from services.router.recording.token_curve import TokenCurve

MAX_ENTRIES = 64
MAX_PLACEMENTS = 4
MAX_TEXT_CHARS = 256


class RequestStatus(StrEnum):
    """Where a request is."""

    QUEUED = "queued"  # it waits for admission
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TimelineEntry(msgspec.Struct, gc=False):
    """One event. `kind` is a name of `console/timeline.py`, which makes its sentence."""

    at_s: float
    kind: str
    attempt: int = 0
    worker: str = ""
    tokens: int | None = None
    text: str = ""


class KeptPlacement(msgspec.Struct, gc=False):
    """The placement of one attempt. Its table of candidates goes where too many tables are kept."""

    at_s: float
    attempt: int
    is_hedge: bool
    prompt_tokens: int
    decision: PlacementDecision


class TimelineWatcher(Protocol):
    """Gets the timelines whose summary changed, and their placements."""

    def on_changed(self, timeline: RequestTimeline) -> None:
        """The request began, moved or ended."""

    def on_placed(self, timeline: RequestTimeline, placement: KeptPlacement) -> None:
        """The timeline keeps one more placement."""

    def on_dropped(self, placement: KeptPlacement) -> None:
        """The timeline keeps a placement no longer."""

    def on_finished(self, timeline: RequestTimeline, cached: Mapping[str, int]) -> None:
        """The request succeeded. `cached`: the tokens that it did not compute, by source."""


class RequestTimeline:
    """One request. All times are on the clock of the event loop. Made by a RequestRecorder.

    A timeline without a watcher is one that no recorder keeps.
    """

    __slots__ = (
        "_clock",
        "_watcher",
        "accepted_tokens",
        "attempts",
        "began_s",
        "began_unix_ms",
        "cached_tokens",
        "code",
        "curve",
        "decode",
        "drafted_tokens",
        "dropped_entries",
        "ended_s",
        "endpoint",
        "entries",
        "error",
        "finish_reason",
        "first_token_s",
        "is_streamed",
        "model",
        "placements",
        "prefill",
        "prompt_tokens",
        "request_id",
        "seq",
        "session",
        "status",
        "tenant",
    )

    def __init__(
        self,
        request_id: str = "",
        *,
        seq: int = 0,
        clock: Callable[[], float] = lambda: 0.0,
        began_s: float = 0.0,
        began_unix_ms: float = 0.0,
        tenant: str = "",
        session: str | None = None,
        model: str = "",
        endpoint: str = "",
        watcher: TimelineWatcher | None = None,
    ) -> None:
        self.request_id, self.seq = request_id, seq
        self.tenant, self.session, self.model, self.endpoint = tenant, session, model, endpoint
        self.began_s, self.began_unix_ms = began_s, began_unix_ms
        self.ended_s: float | None = None
        self.first_token_s: float | None = None
        self.status = RequestStatus.QUEUED
        self.code = self.error = self.finish_reason = ""
        self.is_streamed = True
        self.prompt_tokens = self.cached_tokens = self.drafted_tokens = self.accepted_tokens = 0
        self.prefill = self.decode = ""
        self.attempts = 0
        self.entries: list[TimelineEntry] = []
        self.dropped_entries = 0
        self.placements: list[KeptPlacement] = []
        self.curve = TokenCurve()
        self._clock = clock
        self._watcher = watcher

    def note(
        self, kind: str, *, attempt: int = 0, worker: str = "", tokens: int | None = None, text: str = ""
    ) -> None:
        """Add an event that happens now. Of too many the first and the last ones stay."""
        self.note_at(self._clock(), kind, attempt=attempt, worker=worker, tokens=tokens, text=text)

    def note_at(
        self,
        at_s: float,
        kind: str,
        *,
        attempt: int = 0,
        worker: str = "",
        tokens: int | None = None,
        text: str = "",
    ) -> None:
        """Add an event of this time."""
        if self._watcher is None:
            return
        if len(self.entries) >= MAX_ENTRIES:
            del self.entries[MAX_ENTRIES // 2]
            self.dropped_entries += 1
        self.entries.append(TimelineEntry(at_s, kind, attempt, worker, tokens, text[:MAX_TEXT_CHARS]))

    def admitted(self, at_s: float) -> None:
        """Admission let the request run."""
        self.status = RequestStatus.RUNNING
        self.note_at(at_s, "admitted")
        self._changed()

    def placed(self, decision: PlacementDecision, *, attempt: int, is_hedge: bool = False) -> None:
        """An attempt begins on the workers of this decision."""
        if self._watcher is None:
            return
        at_s = self._clock()
        self.attempts = attempt
        self.prefill, self.decode = decision.prefill, decision.decode
        worker = decision.prefill or decision.decode
        self.note_at(at_s, "hedged" if is_hedge else "placed", attempt=attempt, worker=worker)
        prompt_tokens = decision.cached_tokens + decision.uncached_tokens
        placement = KeptPlacement(at_s, attempt, is_hedge, prompt_tokens, decision)
        if len(self.placements) >= MAX_PLACEMENTS:
            self._watcher.on_dropped(self.placements.pop(1))  # the first one and the latest ones stay
        self.placements.append(placement)
        self._watcher.on_placed(self, placement)
        if attempt > 1:
            self._changed()

    def runs_at(self, decision: PlacementDecision) -> None:
        """The attempt of this decision delivers the answer."""
        self.prefill, self.decode = decision.prefill, decision.decode

    def tokens(self, at_s: float, n_tokens: int) -> None:
        """A batch of tokens arrived."""
        if self.first_token_s is None:
            self.first_token_s = at_s
        self.curve.add(at_s, n_tokens)

    def succeeded(
        self,
        *,
        finish_reason: str,
        cached: Mapping[str, int],
        cached_tokens: int,
        drafted_tokens: int = 0,
        accepted_tokens: int = 0,
    ) -> None:
        """The answer is complete. The request ends with `ended`, which may still fail it."""
        self.finish_reason = finish_reason
        self.cached_tokens = cached_tokens
        self.drafted_tokens, self.accepted_tokens = drafted_tokens, accepted_tokens
        if self._watcher is not None:
            self._watcher.on_finished(self, cached)

    def ended(self, *, code: str = "", error: str = "", is_cancelled: bool = False) -> None:
        """The request is over; `code` names the class of what ended it early. Idempotent."""
        if self.ended_s is not None:
            return
        self.ended_s = self._clock()
        self.code, self.error = code, error[:MAX_TEXT_CHARS]
        if not code:
            self.status = RequestStatus.SUCCEEDED
            self.note_at(self.ended_s, "finished", tokens=self.curve.count, text=self.finish_reason)
        else:
            self.status = RequestStatus.CANCELLED if is_cancelled else RequestStatus.FAILED
            self.note_at(self.ended_s, "failed", tokens=self.curve.count, text=f"{code}: {error}")
        self._changed()

    def moved(self, *, attempt: int, worker: str, text: str) -> None:
        """An attempt ended early on a worker, and another one follows."""
        self.note("moved", attempt=attempt, worker=worker, tokens=self.curve.count, text=text)
        self._changed()

    def _changed(self) -> None:
        if self._watcher is not None:
            self._watcher.on_changed(self)

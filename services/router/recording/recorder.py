"""The last requests of a router. Its memory is bounded; a request costs it some microseconds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping

from msgspec.structs import replace

from libs.common.service_bounds import MAX_RECORDED_CANDIDATES, MAX_RECORDED_REQUESTS
from services.router.recording.timeline import KeptPlacement, RequestTimeline

# Changes that wait for a reader; of more than these the newest stay.
MAX_CHANGES = MAX_RECORDED_REQUESTS


class RequestRecorder:
    """Keeps the timeline of each admitted request until `max_requests` newer ones began."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        wall_clock_s: Callable[[], float],
        max_requests: int = MAX_RECORDED_REQUESTS,
        max_candidates: int = MAX_RECORDED_CANDIDATES,
    ) -> None:
        self._clock = clock
        self._wall_clock_s = wall_clock_s
        self._max_requests = max_requests
        self._max_candidates = max_candidates
        self._timelines: dict[int, RequestTimeline] = {}  # by number, without gaps
        self._newest: dict[str, int] = {}  # the newest number of each request id
        self._tables: deque[KeptPlacement] = deque()  # placements with candidates, oldest first
        self._candidates = 0  # of them
        self._changed: dict[int, RequestTimeline] | None = None  # while someone follows
        self.began = 0  # requests so far; also the number of the newest
        self.prompt_tokens = 0  # of requests that succeeded
        self.cached_tokens: Counter[str] = Counter()  # of the same, by tier, or role of their worker

    def begin(
        self,
        request_id: str,
        *,
        began_s: float,
        tenant: str,
        session: str | None,
        model: str,
        endpoint: str,
    ) -> RequestTimeline:
        """The timeline of a request that arrived at `began_s` and was not refused."""
        self.began += 1
        now_s = self._clock()
        timeline = RequestTimeline(
            request_id,
            seq=self.began,
            clock=self._clock,
            began_s=began_s,
            began_unix_ms=(self._wall_clock_s() - (now_s - began_s)) * 1e3,
            tenant=tenant,
            session=session,
            model=model,
            endpoint=endpoint,
            watcher=self,
        )
        self._keep(timeline)
        timeline.note_at(began_s, "received")
        self.on_changed(timeline)
        return timeline

    def _keep(self, timeline: RequestTimeline) -> None:
        """Index a new timeline, and forget the oldest one where there are too many."""
        self._timelines[timeline.seq] = timeline
        self._newest[timeline.request_id] = timeline.seq
        oldest = self._timelines.pop(timeline.seq - self._max_requests, None)
        if oldest is None:
            return
        if self._newest.get(oldest.request_id) == oldest.seq:
            del self._newest[oldest.request_id]
        for placement in oldest.placements:
            self.on_dropped(placement)
        while self._tables and not self._tables[0].decision.candidates:
            self._tables.popleft()

    # ---- reading

    def __len__(self) -> int:
        return len(self._timelines)

    @property
    def dropped(self) -> int:
        """How many requests were forgotten for newer ones."""
        return self.began - len(self._timelines)

    def find(self, request_id: str, *, seq: int | None = None) -> RequestTimeline | None:
        """The newest request with the id, or the one with this number if its id is that."""
        timeline = self._timelines.get(self._newest.get(request_id, 0) if seq is None else seq)
        return timeline if timeline is not None and timeline.request_id == request_id else None

    def newest_first(self, *, before: int | None = None) -> Iterator[RequestTimeline]:
        """The timelines with numbers below `before`. The caller must not wait while it iterates."""
        first = self.began if before is None else min(before - 1, self.began)
        for seq in range(first, self.began - len(self._timelines), -1):
            yield self._timelines[seq]

    def follow(self) -> None:
        """Collect changed timelines for `pop_changed` from now on."""
        if self._changed is None:
            self._changed = {}

    def unfollow(self) -> None:
        """Collect no more changes."""
        self._changed = None

    def pop_changed(self) -> list[RequestTimeline]:
        """The timelines that began, moved or ended since the last call, each once, oldest change first."""
        changed, self._changed = self._changed, {} if self._changed is not None else None
        return list(changed.values()) if changed else []

    # ---- TimelineWatcher

    def on_changed(self, timeline: RequestTimeline) -> None:
        changed = self._changed
        if changed is None:
            return
        changed.pop(timeline.seq, None)
        changed[timeline.seq] = timeline
        if len(changed) > MAX_CHANGES:
            del changed[next(iter(changed))]

    def on_placed(self, timeline: RequestTimeline, placement: KeptPlacement) -> None:
        self._candidates += len(placement.decision.candidates)
        if timeline.seq not in self._timelines:  # forgotten while it ran
            self.on_dropped(placement)
            return
        self._tables.append(placement)
        while self._candidates > self._max_candidates:
            self.on_dropped(self._tables.popleft())

    def on_dropped(self, placement: KeptPlacement) -> None:
        if placement.decision.candidates:
            self._candidates -= len(placement.decision.candidates)
            placement.decision = replace(placement.decision, candidates=(), chosen=())

    def on_finished(self, timeline: RequestTimeline, cached: Mapping[str, int]) -> None:
        self.prompt_tokens += timeline.prompt_tokens
        self.cached_tokens.update(cached)

"""The recorder keeps the newest requests and a bounded number of placement tables, whatever comes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.router.placement.types import PlacementDecision, WorkerCandidate
from services.router.recording.recorder import RequestRecorder
from services.router.recording.timeline import (
    MAX_ENTRIES,
    MAX_PLACEMENTS,
    MAX_TEXT_CHARS,
    RequestStatus,
    RequestTimeline,
)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def recorder(*, max_requests: int = 10, max_candidates: int = 1000) -> RequestRecorder:
    return RequestRecorder(
        clock=Clock(),
        wall_clock_s=lambda: 1e9,
        max_requests=max_requests,
        max_candidates=max_candidates,
    )


def begin(kept: RequestRecorder, request_id: str = "r") -> RequestTimeline:
    return kept.begin(request_id, began_s=99.0, tenant="t", session=None, model="m", endpoint="Generate")


def decision(rows: int) -> PlacementDecision:
    candidates = tuple(
        WorkerCandidate("prefill", f"prefill-{i}", ("tcp", ""), "", float(i), 0, 0, 0.0) for i in range(rows)
    )
    return PlacementDecision(
        prefill="prefill-0",
        decode="decode-0",
        kvstore="",
        source="nothing",
        reason="",
        chosen=candidates[:1],
        candidates=candidates,
    )


@given(
    begun=st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 7), max_size=6)), max_size=40),
    max_requests=st.integers(1, 8),
    max_candidates=st.integers(7, 60),
)
def test_memory_is_bounded_and_the_newest_requests_stay(
    begun: list[tuple[str, list[int]]], max_requests: int, max_candidates: int
) -> None:
    kept = recorder(max_requests=max_requests, max_candidates=max_candidates)
    timelines: list[RequestTimeline] = []
    for request_id, placements in begun:
        timeline = begin(kept, request_id)
        timelines.append(timeline)
        for attempt, rows in enumerate(placements, start=1):
            timeline.placed(decision(rows), attempt=attempt)
        for old in timelines[:-max_requests]:  # late placements of forgotten requests keep no table
            old.placed(decision(3), attempt=9)
    newest = timelines[::-1][:max_requests]
    assert list(kept.newest_first()) == newest
    assert (len(kept), kept.dropped) == (len(newest), len(timelines) - len(newest))
    tables = [len(p.decision.candidates) for timeline in newest for p in timeline.placements]
    assert sum(tables) == kept._candidates <= max_candidates  # none of a forgotten request
    assert sum(len(table.decision.candidates) for table in kept._tables) == kept._candidates
    for timeline in newest:
        assert kept.find(timeline.request_id, seq=timeline.seq) is timeline
    for request_id in "abc":
        same = [timeline for timeline in newest if timeline.request_id == request_id]
        assert kept.find(request_id) is (same[0] if same else None)
    for timeline in timelines[: len(timelines) - len(newest)]:
        assert kept.find(timeline.request_id, seq=timeline.seq) is None


def test_the_tables_of_the_newest_placements_stay_and_each_keeps_its_choice() -> None:
    kept = recorder(max_candidates=10)
    timelines = [begin(kept) for _ in range(3)]
    for timeline in timelines:
        timeline.placed(decision(5), attempt=1)
    placements = [timeline.placements[0].decision for timeline in timelines]
    assert [len(each.candidates) for each in placements] == [0, 5, 5]
    assert [each.prefill for each in placements] == ["prefill-0"] * 3


def test_of_too_many_events_the_first_and_the_last_stay() -> None:
    timeline = begin(recorder())
    for index in range(1000):
        timeline.note("moved", attempt=index)
    timeline.ended(code="Unavailable", error="x" * 1000)
    assert len(timeline.entries) == MAX_ENTRIES
    assert timeline.dropped_entries == 1002 - MAX_ENTRIES
    assert [entry.kind for entry in timeline.entries[:2]] == ["received", "moved"]
    assert timeline.entries[-2].attempt == 999 and timeline.entries[-1].kind == "failed"
    assert len(timeline.entries[-1].text) == len(timeline.error) == MAX_TEXT_CHARS
    for attempt in range(1, 10):
        timeline.placed(decision(1), attempt=attempt)
    assert [kept.attempt for kept in timeline.placements] == [1, *range(11 - MAX_PLACEMENTS, 10)]


def test_a_request_ends_once() -> None:
    kept = recorder()
    timeline = begin(kept)
    statuses = [timeline.status]
    timeline.admitted(100.0)
    assert [*statuses, timeline.status] == [RequestStatus.QUEUED, RequestStatus.RUNNING]
    timeline.tokens(100.5, 3)
    timeline.succeeded(finish_reason="stop", cached={"prefill": 64, "dram": 128}, cached_tokens=192)
    timeline.ended()
    timeline.ended(code="Aborted", is_cancelled=True)
    assert (timeline.status, timeline.code) == (RequestStatus.SUCCEEDED, "")
    assert kept.cached_tokens == {"prefill": 64, "dram": 128}
    for code, is_cancelled, status in (
        ("Aborted", True, RequestStatus.CANCELLED),
        ("Unavailable", False, RequestStatus.FAILED),
    ):
        other = begin(kept)
        other.ended(code=code, is_cancelled=is_cancelled)
        assert other.status is status


def test_changes_are_collected_only_while_someone_follows() -> None:
    kept = recorder()

    def changed() -> Sequence[int]:
        return [timeline.seq for timeline in kept.pop_changed()]

    begin(kept)
    assert changed() == []
    kept.follow()
    first, second = begin(kept), begin(kept)
    first.ended()
    assert changed() == [second.seq, first.seq]  # each once, in the order of their last change
    assert changed() == []
    second.moved(attempt=1, worker="decode-0", text="")
    kept.unfollow()
    assert changed() == []


def test_a_timeline_of_no_recorder_keeps_nothing() -> None:
    timeline = RequestTimeline("r")
    timeline.note("received")
    timeline.placed(decision(3), attempt=1)
    timeline.ended()
    assert timeline.entries == [] and timeline.placements == []

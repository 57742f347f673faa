"""Sentences, placement tables and pages of requests: what is left out, and in which order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.console.placement_table import placement_json, table_rows
from services.router.console.request_pages import RequestFilter, page_of, read_filter
from services.router.console.timeline import _SENTENCES, request_json, sentence
from services.router.placement.policy import place
from services.router.placement.types import (
    DecodeWorker,
    PlacementDecision,
    PlacementFleet,
    PlacementRequest,
    PrefillWorker,
)
from services.router.recording.recorder import RequestRecorder
from services.router.recording.timeline import KeptPlacement, RequestStatus, RequestTimeline, TimelineEntry
from slipstream.errors import InvalidArgument

ROUTER = Path(__file__).resolve().parents[3] / "services" / "router"


def recorder() -> RequestRecorder:
    return RequestRecorder(clock=lambda: 10.0, wall_clock_s=lambda: 1e9, max_requests=50)


def begin(kept: RequestRecorder, request_id: str, tenant: str, session: str | None = None) -> RequestTimeline:
    return kept.begin(request_id, began_s=9.0, tenant=tenant, session=session, model="m", endpoint="Generate")


@st.composite
def decisions(draw: st.DrawFn) -> PlacementDecision:
    queued = st.lists(st.integers(0, 5000), min_size=1, max_size=12)
    dead = st.sampled_from(["", "", "does not answer"])
    prefill = [
        PrefillWorker(f"p{i}", queued_tokens=n, refused=draw(dead) if i else "")
        for i, n in enumerate(draw(queued))
    ]
    decode = [
        DecodeWorker(f"d{i}", context_tokens=n, refused=draw(dead) if i else "")
        for i, n in enumerate(draw(queued))
    ]
    return place(PlacementRequest(1000, may_skip_prefill=True), PlacementFleet(tuple(prefill), tuple(decode)))


@given(decision=decisions(), limit=st.integers(2, 30))
def test_a_table_has_the_chosen_rows_then_the_cheapest_usable_ones(
    decision: PlacementDecision, limit: int
) -> None:
    rows = list(table_rows(decision, limit=limit))
    assert len(rows) == min(limit, len(decision.candidates))
    n_chosen = len(decision.chosen)
    assert {id(row) for row in rows[:n_chosen]} == {id(row) for row in decision.chosen}
    others = rows[n_chosen:]
    ranks = [(bool(row.refused), row.total_ms) for row in others]
    assert ranks == sorted(ranks)
    shown = {id(row) for row in rows}
    left_out = [(bool(c.refused), c.total_ms) for c in decision.candidates if id(c) not in shown]
    assert not (ranks and left_out) or ranks[-1] <= min(left_out)


@given(decision=decisions())
def test_the_terms_add_up_and_the_deciding_one_is_named(decision: PlacementDecision) -> None:
    page = placement_json(KeptPlacement(1.0, 1, False, 1000, decision), began_s=0.5)
    assert page["at_ms"] == 500.0
    for row in page["candidates"]:
        assert row["total_ms"] == pytest.approx(sum(row["terms"].values()), abs=0.01)
    cost = dict(page["cost"])
    assert cost.pop("total_ms") == pytest.approx(sum(cost.values()), abs=0.01)
    priced = {row["instance"]: row for row in page["candidates"] if row["part"] == "prefill"}
    for reason in page["reasons"]:
        if (reason["part"], reason["rule"]) == ("prefill", "cost"):
            chosen, against = priced[reason["chosen"]]["terms"], priced[reason["against"]]["terms"]
            by_term = {term: against[term] - chosen[term] for term in chosen}
            assert max(by_term.values()) == pytest.approx(by_term[reason["term"]], abs=0.01)
            assert reason["difference_ms"] == pytest.approx(by_term[reason["term"]], abs=0.01)


def test_every_kind_that_the_router_notes_has_a_sentence() -> None:
    noted: set[str] = set()
    for path in (*(ROUTER / "execution").rglob("*.py"), *ROUTER.glob("recording/*.py")):
        source = path.read_text()
        for call in re.findall(r"\.note(?:_at)?\(([^)]*)", source):
            noted |= set(re.findall(r'"([a-z_]+)"', call))
    assert len(noted) >= 15
    assert noted == set(_SENTENCES)
    entry = TimelineEntry(0.0, "kind of a later version", text="what happened")
    assert sentence(entry) == "what happened"
    for kind in _SENTENCES:
        said = sentence(TimelineEntry(0.0, kind, 2, "decode-0", 7, "dram"))
        assert said and "{" not in said and "  " not in said


def test_texts_with_braces_are_shown_as_they_are() -> None:
    timeline = begin(recorder(), "r", "t")
    timeline.moved(attempt=1, worker="decode-0", text="{0} {worker.__class__}")
    page = request_json(timeline, now_s=11.0)
    assert page["timeline"][-1]["text"].endswith(": {0} {worker.__class__}.")


@given(
    begun=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from(["s", "u", None])), max_size=80),
    limit=st.integers(1, 7),
    tenant=st.sampled_from(["", "a"]),
    session=st.sampled_from(["", "s"]),
    status=st.sampled_from(["", "running", "succeeded"]),
)
def test_pages_in_a_row_have_each_request_that_passes_once(
    begun: list[tuple[str, str | None]], limit: int, tenant: str, session: str, status: str
) -> None:
    kept = recorder()
    for number, (of, name) in enumerate(begun):
        timeline = begin(kept, f"r{number}", of, name)
        if number % 2:
            timeline.ended()
    found: list[int] = []
    before: int | None = None
    while True:
        wanted = RequestFilter(limit=limit, before=before, tenant=tenant, session=session, status=status)
        page = page_of(kept, wanted)
        assert len(page.timelines) <= limit
        found += [timeline.seq for timeline in page.timelines]
        before = page.next_before
        if before is None:
            break
        assert len(page.timelines) == limit
    ended = RequestStatus.SUCCEEDED
    assert found == [
        timeline.seq
        for timeline in kept.newest_first()
        if tenant in ("", timeline.tenant)
        and session in ("", timeline.session)
        and (not status or (timeline.status == ended) == (status == ended))
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [("limit", "501"), ("limit", "-1"), ("limit", "١"), ("before", "0"), ("status", "x"), ("q", "x" * 257)],
)
def test_a_bad_query_names_its_field(field: str, value: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read_filter({field: value})
    assert refused.value.field == field

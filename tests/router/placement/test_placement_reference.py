"""`place` decides what the readable form decides, to the last bit, and its reasons are true."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.placement import explanation
from services.router.placement.policy import place
from services.router.placement.types import (
    ChoiceReason,
    PlacementDecision,
    PlacementFleet,
    PlacementRequest,
    WorkerCandidate,
)
from slipstream.errors import Unavailable
from tests.router.placement import reference
from tests.router.placement.random_fleets import RandomFleets
from tests.router.placement.reference_pricing import ReferenceLeg
from tests.support.examples import examples

FLEETS_A_SEED = 50
_FIELDS = ("prefill", "decode", "kvstore", "source", "peer", "cold", "cached_tokens", "uncached_tokens")
_TERMS = (*explanation.TERM_LABELS, "total_ms")
_CANDIDATE_FIELDS = tuple(name for name in ReferenceLeg.__struct_fields__ if name != "cost")


def _decide(request: PlacementRequest, fleet: PlacementFleet) -> PlacementDecision | str:
    try:
        return place(request, fleet)
    except Unavailable as error:
        return str(error)


def _decide_by_reference(
    request: PlacementRequest, fleet: PlacementFleet
) -> reference.ReferenceDecision | str:
    try:
        return reference.place(request, fleet)
    except Unavailable as error:
        return str(error)


@given(st.integers(0, 1 << 48))
def test_the_decision_is_that_of_the_reference(seed: int) -> None:
    for i in range(FLEETS_A_SEED):
        draw = RandomFleets(seed * FLEETS_A_SEED + i)
        fleet, request = draw.fleet(), draw.request()
        expected, decision = _decide_by_reference(request, fleet), _decide(request, fleet)
        if isinstance(decision, str) or isinstance(expected, str):
            assert decision == expected
            continue
        assert [getattr(decision, name) for name in _FIELDS] == [getattr(expected, name) for name in _FIELDS]
        assert [getattr(decision.cost, name) for name in _TERMS] == [
            getattr(expected.cost, name) for name in _TERMS
        ]
        legs = [leg for leg in expected.legs if leg.part != "local" or not leg.refused]
        assert list(map(_row, decision.candidates)) == list(map(_row, legs))


def _row(candidate: WorkerCandidate | ReferenceLeg) -> list[object]:
    terms = [getattr(candidate.cost, name) for name in _TERMS]
    return [*(getattr(candidate, name) for name in _CANDIDATE_FIELDS), *terms]


@given(st.integers(0, 1 << 48))
@settings(max_examples=examples(20), deadline=None)
def test_the_term_that_is_named_differs_most(seed: int) -> None:
    for i in range(FLEETS_A_SEED):
        draw = RandomFleets(seed * FLEETS_A_SEED + i)
        decision = _decide(draw.request(), draw.fleet())
        if isinstance(decision, PlacementDecision):
            _check_reasons(decision)


@given(st.integers(0, 1 << 48))
@settings(max_examples=examples(20), deadline=None)
def test_what_a_reason_says_of_other_workers_is_true(seed: int) -> None:
    for i in range(FLEETS_A_SEED):
        draw = RandomFleets(seed * FLEETS_A_SEED + i)
        decision = _decide(draw.request(), draw.fleet())
        if isinstance(decision, PlacementDecision):
            for reason in decision.reasons:
                _check_rule(reason, decision)


def _check_rule(reason: ChoiceReason, decision: PlacementDecision) -> None:
    usable = [candidate for candidate in decision.candidates if not candidate.refused]
    chosen = next((c for c in usable if (c.part, c.instance) == (reason.part, reason.chosen)), None)
    if reason.text.startswith("no prefill worker is ready"):
        assert all(candidate.part != "prefill" for candidate in usable)
    if reason.text.startswith("no usable prefill worker has"):
        groups = {part: {c.group for c in usable if c.part == part} for part in ("prefill", "decode")}
        assert groups["prefill"] and not groups["prefill"] & groups["decode"]
    if chosen is None:
        return  # a pair
    others = [c for c in usable if (c.part, c.group) == (chosen.part, chosen.group) and c is not chosen]
    alike = [other for other in others if other.total_ms <= chosen.total_ms]
    if reason.text.startswith("is the only worker of its group"):
        assert not others
    elif reason.rule == explanation.BY_COST and " with " not in reason.against and "holds" not in reason.text:
        assert not alike or decision.cold
        assert reason.against in [other.instance for other in others]
    elif reason.rule == explanation.BY_ROUND_ROBIN:
        assert all(other.last_cold > chosen.last_cold for other in alike)
        assert ("got no cold prompt" in reason.text) == (chosen.last_cold == 0)
    elif reason.rule == explanation.BY_HELD:
        assert all(other.held_tokens < chosen.held_tokens for other in alike)


def _check_reasons(decision: PlacementDecision) -> None:
    by_name = {(c.part, c.instance): c for c in decision.candidates}
    for reason in decision.reasons:
        assert reason.text in decision.reason
        chosen = by_name.get((reason.part, reason.chosen))
        against = by_name.get((reason.part, reason.against))
        if reason.rule == explanation.REFUSED:
            assert chosen and against and against.refused and against.held_tokens > chosen.held_tokens
        if reason.rule != explanation.BY_COST:
            continue
        assert reason.difference_ms > 0
        if chosen is None or against is None:
            continue  # one of the two is a pair
        assert not against.refused and against.cost.total_ms > chosen.cost.total_ms
        differences = {
            term: getattr(against.cost, term) - getattr(chosen.cost, term) for term in explanation.TERM_LABELS
        }
        assert reason.difference_ms == differences[reason.term] == max(differences.values())
        if reason.term == "queue_ms" and reason.part == "prefill":
            assert against.load_tokens or against.ahead_requests  # an idle worker is not called busy

"""The decision over columns is the decision written for one worker at a time, reasons included."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

from services.router.placement import explanation
from services.router.placement.policy import place_records
from services.router.placement.types import Cost, PlacementDecision, PlacementFleet, PlacementRequest
from slipstream.errors import Unavailable
from tests.router.placement import reference
from tests.router.placement.random_fleets import RandomFleets

FLEETS_A_SEED = 50


def _decide(request: PlacementRequest, fleet: PlacementFleet) -> PlacementDecision | str:
    try:
        return place_records(request, fleet)
    except Unavailable as error:
        return str(error)


def _decide_by_records(request: PlacementRequest, fleet: PlacementFleet) -> PlacementDecision | str:
    try:
        return reference.place(request, fleet)
    except Unavailable as error:
        return str(error)


@given(st.integers(0, 1 << 48))
@settings(max_examples=400, deadline=None)
def test_both_forms_decide_and_explain_the_same(seed: int) -> None:
    for i in range(FLEETS_A_SEED):
        draw = RandomFleets(seed * FLEETS_A_SEED + i)
        fleet, request = draw.fleet(), draw.request()
        expected, decision = _decide_by_records(request, fleet), _decide(request, fleet)
        assert decision == expected
        if isinstance(decision, PlacementDecision) and isinstance(expected, PlacementDecision):
            assert decision.candidates == expected.candidates


@given(st.integers(0, 1 << 48))
@settings(max_examples=100, deadline=None)
def test_the_term_that_is_named_differs_most(seed: int) -> None:
    for i in range(FLEETS_A_SEED):
        draw = RandomFleets(seed * FLEETS_A_SEED + i)
        decision = _decide(draw.request(), draw.fleet())
        if isinstance(decision, PlacementDecision):
            _check_reasons(decision)


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
            field.name: getattr(against.cost, field.name) - getattr(chosen.cost, field.name)
            for field in fields(Cost)
        }
        assert reason.difference_ms == differences[reason.term] == max(differences.values())
        if reason.term == "queue_ms" and reason.part == "prefill":
            assert against.load_tokens or against.ahead_requests  # an idle worker is not called busy

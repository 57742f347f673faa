"""Each rule beside the price, from both sides of where it begins to hold."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from services.router.placement import explanation
from services.router.placement.cost_model import PrefillModel
from services.router.placement.policy import place
from services.router.placement.prefill_queue import queue_delay
from services.router.placement.types import DecodeWorker, PlacementFleet, PlacementRequest, PrefillWorker
from slipstream.errors import Unavailable

QUICK = PrefillModel(token_ms=0.01)
DECODE = (DecodeWorker("d0"),)


def two(load_0: int, load_1: int, *others: PrefillWorker) -> PlacementFleet:
    """p0 computes far quicker than p1."""
    quick = PrefillWorker("p0", queued_tokens=load_0, model=QUICK)
    return PlacementFleet((quick, PrefillWorker("p1", queued_tokens=load_1), *others), DECODE)


def test_the_bound_is_a_quarter_above_the_fair_share_of_those_that_may_be_used() -> None:
    request = PlacementRequest(1_000)
    assert place(request, two(4_900, 2_000)).prefill == "p0"  # fair are 3,950, the bound is 4,937
    assert place(request, two(5_100, 2_000)).prefill == "p1"  # fair are 4,050, the bound is 5,062
    for other in (
        PrefillWorker("p2", queued_tokens=10**6, transport="mooncake"),
        PrefillWorker("p2", queued_tokens=10**6, refused="does not answer"),
        PrefillWorker("p2", queued_tokens=10**6, fingerprint="another"),
    ):
        assert place(request, two(5_100, 2_000, other)).prefill == "p1"
    assert place(replace(request, prefill_expected_tokens={"p0": 100}), two(5_100, 2_000)).prefill == "p0"


def test_a_prompt_in_a_queue_weighs_no_more_than_the_one_that_may_overtake_it() -> None:
    long = PrefillWorker("p0", queued_tokens=100_000, queued_requests=1, queue=(100_000,))
    unknown = replace(long, queued_requests=3, queued_tokens=150_000)
    unnumbered = replace(long, queued_requests=0, queue=())
    for worker, prompt, load in (
        (long, 500, 500),
        (long, 200_000, 100_000),
        (unknown, 500, 1_500),
        (unknown, 200_000, 150_000),
        (unnumbered, 500, 100_000),
    ):
        assert queue_delay(worker, prompt, prompt)[4] == load


@pytest.mark.parametrize("held", [0, 400], ids=["cold", "held by all"])
def test_equals_are_drawn_by_seed(held: int) -> None:
    fleet = PlacementFleet(
        tuple(PrefillWorker(f"p{i}") for i in range(4)), tuple(DecodeWorker(f"d{i}") for i in range(4))
    )
    requests = [
        PlacementRequest(500, seed, prefill_expected_tokens={f"p{i}": held for i in range(4)})
        for seed in range(400)
    ]
    for chosen in (
        Counter(place(request, fleet).prefill for request in requests),
        Counter(place(request, fleet).decode for request in requests),
    ):
        assert len(chosen) == 4 and min(chosen.values()) > 60


def test_of_equals_the_one_that_holds_most_is_taken() -> None:
    fleet = PlacementFleet(
        (PrefillWorker("p0"),), tuple(DecodeWorker(f"d{i}", block_bytes=0) for i in range(4))
    )
    for seed in range(20):
        assert (
            place(PlacementRequest(500, seed, decode_expected_tokens={"d1": 100, "d2": 200}), fleet).decode
            == "d2"
        )


def test_a_cold_request_passes_over_a_turn_that_costs_a_tenth_more_but_not_one_that_costs_half() -> None:
    def chosen(token_ms: float) -> str:
        slower = PrefillWorker("p1", last_cold=0, model=PrefillModel(token_ms=token_ms))
        return place(
            PlacementRequest(5_000), PlacementFleet((PrefillWorker("p0", last_cold=5), slower), DECODE)
        ).prefill

    assert PrefillModel().token_ms == 0.5
    assert (chosen(0.52), chosen(0.75)) == ("p1", "p0")


def test_a_region_is_as_much_farther_as_its_way_takes() -> None:
    def chosen(way_ms: float) -> str:
        quicker = PrefillWorker("there", region="far", model=PrefillModel(request_ms=1.0))
        fleet = PlacementFleet(
            (PrefillWorker("here", model=PrefillModel(request_ms=21.0)), quicker),
            (DecodeWorker("d-here"), DecodeWorker("d-there", region="far")),
            region_ms={"far": way_ms},
        )
        return place(PlacementRequest(100), fleet).prefill

    assert (chosen(19.0), chosen(21.0)) == ("there", "here")


def test_the_way_to_a_region_counts_for_decode_workers_that_compute_prompts_too() -> None:
    def chosen(way_ms: float) -> str:
        decode = (
            DecodeWorker("d-here", prefill_model=PrefillModel(request_ms=21.0)),
            DecodeWorker("d-there", region="far", prefill_model=PrefillModel(request_ms=1.0)),
        )
        fleet = PlacementFleet((), decode, region_ms={"far": way_ms})
        return place(PlacementRequest(100, may_skip_prefill=True), fleet).decode

    assert (chosen(19.0), chosen(21.0)) == ("d-there", "d-here")


def test_a_prompt_is_put_between_decode_steps_only_for_a_gain() -> None:
    request = PlacementRequest(
        1_000, prefill_expected_tokens={"p0": 990}, decode_expected_tokens={"d0": 900}, may_skip_prefill=True
    )

    def fleet(queued_tokens: int) -> PlacementFleet:
        model = PrefillModel(token_ms=1.0)
        return PlacementFleet((PrefillWorker("p0", queued_tokens=queued_tokens, model=model),), DECODE)

    parts = {leg.part: leg.cost.total_ms for leg in place(request, fleet(0)).candidates}
    ahead_ms = parts["prefill"] + parts["decode"] - parts["local"]  # of the local way, with nothing queued
    at_margin = round(25 - ahead_ms)
    assert at_margin > 5
    below, above = place(request, fleet(at_margin - 5)), place(request, fleet(at_margin + 5))
    assert (below.prefill, above.prefill) == ("p0", "")
    saved_ms = below.cost.total_ms - parts["local"]
    assert below.reasons[-1] == explanation.margin_reason("p0 with d0", "d0", saved_ms, 25.0)
    assert above.reasons[-1] == explanation.cost_reason(
        "local", "d0", above.cost, "p0 with d0", replace(below.cost, queue_ms=below.cost.queue_ms + 10)
    )
    dear = place(replace(request, decode_expected_tokens={"d0": 500}), fleet(0))
    assert dear.prefill == "p0" and [reason.part for reason in dear.reasons] == ["prefill", "decode"]


@pytest.mark.parametrize("slower_ms", [0.0, 10.0])
def test_a_pair_is_explained_against_the_next_one_of_another_group(slower_ms: float) -> None:
    groups = [("a", 10.0), ("b", 10.0 + slower_ms), ("c", 40.0)]
    for n_groups in (2, 3):
        prefill = [
            PrefillWorker(f"p-{name}", region=name, model=PrefillModel(request_ms=request_ms))
            for name, request_ms in groups[:n_groups]
        ]
        decode = tuple(DecodeWorker(f"d-{name}", region=name) for name, _ in groups)
        reason = place(PlacementRequest(100), PlacementFleet(tuple(prefill), decode)).reasons[-1]
        assert (reason.chosen, reason.against) == ("p-a with d-a", "p-b with d-b")
        assert reason.rule == ("cost" if slower_ms else "name")
        assert reason.difference_ms == pytest.approx(slower_ms)


def test_a_requested_worker_is_used_however_busy() -> None:
    fleet = PlacementFleet(
        (PrefillWorker("p0", queued_tokens=10**6), PrefillWorker("p1")),
        (DecodeWorker("d0"), DecodeWorker("d1")),
    )
    decision = place(PlacementRequest(10, requested_prefill="p0", may_skip_prefill=True), fleet)
    assert (decision.prefill, "requested" in decision.reason) == ("p0", True)


def test_missing_tiers_are_unavailable_unless_decode_may_do_it_all() -> None:
    with pytest.raises(Unavailable, match="no decode"):
        place(PlacementRequest(1), PlacementFleet((PrefillWorker("p0"),)))
    alone = PlacementFleet((), (DecodeWorker("d0"),))
    with pytest.raises(Unavailable, match="no prefill"):
        place(PlacementRequest(1), alone)
    forced = place(PlacementRequest(5_000, may_skip_prefill=True), alone)
    assert forced.prefill == ""
    assert forced.reasons[-1] == explanation.forced_reason("d0", "no prefill worker is ready")
    with pytest.raises(Unavailable, match="p9"):
        place(PlacementRequest(1, requested_prefill="p9"), PlacementFleet((PrefillWorker("p0"),), DECODE))

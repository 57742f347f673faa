"""Properties of placement: only eligible workers, monotone in load, one decision for a seed, load bounded."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from services.router.placement.cost_model import PrefillModel
from services.router.placement.kv_source import find_sources
from services.router.placement.policy import LOCAL_MAX_TOKENS, place
from services.router.placement.prefill_queue import queue_delay
from services.router.placement.round_robin import ColdRoundRobin
from services.router.placement.selection import LOAD_BOUND
from services.router.placement.types import (
    DecodeWorker,
    HeldTokens,
    KvStore,
    PlacementCost,
    PlacementFleet,
    PlacementRequest,
    PrefillWorker,
)
from slipstream.errors import Unavailable
from tests.router.placement.placement_strategies import fleets, requests


def _can_run(request: PlacementRequest, fleet: PlacementFleet) -> bool:
    decode = [d for d in fleet.decode if not d.refused and d.fingerprint == request.fingerprint]
    if not decode:
        return False
    prefill = {
        (p.transport, p.region)
        for p in fleet.prefill
        if not p.refused and p.fingerprint == request.fingerprint
    }
    return request.may_skip_prefill or any((d.transport, d.region) in prefill for d in decode)


@given(requests(), fleets())
def test_only_eligible_and_compatible_workers_are_chosen(
    request: PlacementRequest, fleet: PlacementFleet
) -> None:
    try:
        decision = place(request, fleet)
    except Unavailable:
        assert not _can_run(request, fleet)
        return
    assert _can_run(request, fleet)
    decode = next(d for d in fleet.decode if d.instance == decision.decode)
    assert not decode.refused and decode.fingerprint == request.fingerprint
    if decision.prefill:
        prefill = next(p for p in fleet.prefill if p.instance == decision.prefill)
        assert not prefill.refused and prefill.fingerprint == request.fingerprint
        assert (prefill.transport, prefill.region) == (decode.transport, decode.region)
    else:
        assert request.may_skip_prefill
    if decision.kvstore:
        store = next(s for s in fleet.stores if s.instance == decision.kvstore)
        assert not store.refused
        assert (store.transport, store.region) == (decode.transport, decode.region)
    if decision.peer:
        peer = next(p for p in fleet.prefill if p.instance == decision.peer)
        assert not peer.refused and peer.fingerprint == request.fingerprint
        assert (peer.transport, peer.region) == (decode.transport, decode.region)
        there = request.prefill_expected_tokens.get(decision.prefill, 0)
        assert request.prefill_lendable_tokens[decision.peer] > min(
            there, request.prefill_confirmed_tokens.get(decision.prefill, there)
        )
        assert decision.source == decision.peer
    assert 1 <= decision.uncached_tokens <= request.prompt_tokens
    assert decision.cached_tokens + decision.uncached_tokens == request.prompt_tokens


@given(requests(), fleets())
def test_the_same_request_and_fleet_give_the_same_decision_in_any_order(
    request: PlacementRequest, fleet: PlacementFleet
) -> None:
    backwards = replace(
        fleet, prefill=fleet.prefill[::-1], decode=fleet.decode[::-1], stores=fleet.stores[::-1]
    )
    try:
        decision = place(request, fleet)
    except Unavailable:
        with pytest.raises(Unavailable):
            place(request, backwards)
        return
    assert decision == place(request, fleet)
    other = place(request, backwards)
    assert (other.prefill, other.decode, other.kvstore, other.peer) == (
        decision.prefill,
        decision.decode,
        decision.kvstore,
        decision.peer,
    )


def test_of_stores_that_hold_the_same_each_order_gives_the_same() -> None:
    stores = tuple(KvStore(name) for name in ("k0", "k1", "k2"))
    held = {name: HeldTokens(512, 512) for name in ("k0", "k1")}
    request = PlacementRequest(prompt_tokens=1024, seed=0, fingerprint="A", store_held=held)
    chosen = set()
    for order in itertools.permutations(stores):
        sources = find_sources(request, PlacementFleet(stores=order))["", ""]
        source, _, _ = sources.best_read(0, 1024.0, PrefillModel(token_ms=1.0))
        assert source is not None
        chosen.add(source.instance)
    assert len(chosen) == 1
    assert chosen <= held.keys()


@given(requests(), fleets(), st.integers(1, 500_000), st.data())
def test_more_load_never_attracts(
    request: PlacementRequest, fleet: PlacementFleet, more: int, data: st.DataObject
) -> None:
    """A worker that was not chosen is not chosen when only its own load has grown."""
    try:
        before = place(request, fleet)
    except Unavailable:
        return
    if fleet.prefill:
        worker = data.draw(st.sampled_from(fleet.prefill))
        busier = replace(worker, queued_tokens=worker.queued_tokens + more)
        if data.draw(st.booleans()):
            busier = replace(busier, queued_requests=worker.queued_requests + 1, queue=(*worker.queue, more))
        grown = replace(fleet, prefill=tuple(busier if w is worker else w for w in fleet.prefill))
        if worker.instance != before.prefill:
            assert place(request, grown).prefill != worker.instance
    decode = data.draw(st.sampled_from(fleet.decode))
    fuller = replace(decode, context_tokens=decode.context_tokens + more, free_blocks=None)
    base = replace(
        fleet, decode=tuple(replace(w, free_blocks=None) if w is decode else w for w in fleet.decode)
    )
    if place(request, base).decode != decode.instance:
        grown = replace(fleet, decode=tuple(fuller if w is decode else w for w in fleet.decode))
        assert place(request, grown).decode != decode.instance


@given(requests(), fleets())
def test_no_worker_gets_more_than_the_bound_allows(request: PlacementRequest, fleet: PlacementFleet) -> None:
    try:
        decision = place(request, fleet)
    except Unavailable:
        return
    for name, workers, held_by in (
        (decision.prefill, fleet.prefill, request.prefill_expected_tokens),
        (decision.decode, fleet.decode, request.decode_expected_tokens),
    ):
        if not name:
            continue
        chosen = next(w for w in workers if w.instance == name)
        group = [
            _load(w, request)
            for w in workers
            if not w.refused
            and w.fingerprint == "A"
            and (w.transport, w.region) == (chosen.transport, chosen.region)
        ]
        fair = (sum(group) + request.prompt_tokens) / len(group)
        held = min(held_by.get(name, 0), request.prompt_tokens)
        assert _load(chosen, request) <= LOAD_BOUND * fair + held


def _load(worker: PrefillWorker | DecodeWorker, request: PlacementRequest) -> int:
    if isinstance(worker, DecodeWorker):
        return worker.context_tokens
    return queue_delay(worker, request.prompt_tokens, request.prompt_tokens)[4]


@given(requests(), fleets())
def test_every_term_is_named_and_they_sum_to_what_is_compared(
    request: PlacementRequest, fleet: PlacementFleet
) -> None:
    try:
        decision = place(request, fleet)
    except Unavailable:
        return
    for cost in (decision.cost, *(leg.cost for leg in decision.candidates)):
        terms = [getattr(cost, f.name) for f in fields(PlacementCost) if f.name != "total_ms"]
        assert all(term >= 0 for term in terms)
        assert cost.total_ms == pytest.approx(sum(terms))
    if decision.prefill:
        parts = sum(candidate.total_ms for candidate in decision.chosen)
        assert decision.cost.total_ms - decision.cost.region_ms == pytest.approx(parts)
    assert decision.decode in decision.reason


def _idle(n: int) -> PlacementFleet:
    return PlacementFleet(
        tuple(PrefillWorker(f"p{i}") for i in range(n)), tuple(DecodeWorker(f"d{i}") for i in range(n))
    )


@given(st.integers(2, 6), st.integers(640, 50_000), st.integers(0, 1 << 32))
def test_an_idle_fleet_goes_back_to_where_the_kv_is(n: int, tokens: int, seed: int) -> None:
    fleet = replace(_idle(n), decode=tuple(DecodeWorker(f"d{i}", block_bytes=1 << 16) for i in range(n)))
    request = PlacementRequest(
        tokens, seed, prefill_expected_tokens={"p1": tokens // 2}, decode_expected_tokens={"d1": tokens // 2}
    )
    decision = place(request, fleet)
    assert (decision.prefill, decision.decode, decision.source) == ("p1", "d1", "worker")


def test_affinity_yields_to_load() -> None:
    fleet = PlacementFleet(
        (PrefillWorker("p0", queued_tokens=100_000), PrefillWorker("p1")),
        (DecodeWorker("d0", context_tokens=100_000, sequences=10), DecodeWorker("d1")),
    )
    request = PlacementRequest(
        1000, 1, prefill_expected_tokens={"p0": 900}, decode_expected_tokens={"d0": 900}
    )
    decision = place(request, fleet)
    assert (decision.prefill, decision.decode) == ("p1", "d1")
    assert "p0 holds 900 tokens but is refused: 100000 tokens in flight" in decision.reason


def test_a_wrong_model_cannot_make_a_hot_spot() -> None:
    """The fit says that p0 computes for nothing: the bound holds all the same."""
    free = PrefillModel(1e-6, 1e-6, 1e-6, 1e-6, 1e-6)
    loads = dict.fromkeys(("p0", "p1", "p2"), 0)
    for seed in range(60):
        prefill = tuple(
            PrefillWorker(name, queued_tokens=load, model=free if name == "p0" else PrefillModel())
            for name, load in loads.items()
        )
        loads[
            place(PlacementRequest(1000, seed), PlacementFleet(prefill, (DecodeWorker("d0"),))).prefill
        ] += 1000
    assert max(loads.values()) <= LOAD_BOUND * sum(loads.values()) / 3 + 1000


def test_a_stale_report_is_unknown_and_not_full() -> None:
    fleet = PlacementFleet(
        (PrefillWorker("p0"), PrefillWorker("p1", queued_tokens=5_000)), (DecodeWorker("d0"),)
    )
    assert place(PlacementRequest(1000, 0), fleet).prefill == "p0"


@given(st.integers(2, 5), st.lists(st.integers(100, 2000), min_size=20, max_size=60))
def test_a_burst_of_siblings_is_spread_within_the_bound(n: int, sizes: list[int]) -> None:
    """Placed one after the other, none ending, all with their prefix at p0 and wherever one went before."""
    loads = dict.fromkeys((f"p{i}" for i in range(n)), 0)
    held = {"p0": 90}
    for seed, size in enumerate(sizes):
        prefill = tuple(PrefillWorker(name, queued_tokens=load) for name, load in loads.items())
        chosen = place(
            PlacementRequest(size, seed, prefill_expected_tokens=held),
            PlacementFleet(prefill, (DecodeWorker("d0"),)),
        ).prefill
        loads[chosen] += size - held.get(chosen, 0)
        held[chosen] = 90
        assert max(loads.values()) <= LOAD_BOUND * sum(loads.values()) / n + max(sizes)
    assert len(held) == n


def test_siblings_of_one_burst_meet_while_that_is_cheaper() -> None:
    held: dict[str, int] = {}
    loads = dict.fromkeys(("p0", "p1", "p2", "p3"), 0)
    chosen = []
    for seed in range(4):
        prefill = tuple(PrefillWorker(name, queued_tokens=load) for name, load in loads.items())
        decision = place(
            PlacementRequest(10_100, seed, prefill_expected_tokens=held),
            PlacementFleet(prefill, (DecodeWorker("d0"),)),
        )
        loads[decision.prefill] += decision.uncached_tokens
        held[decision.prefill] = 10_000  # what the router enters when it places
        chosen.append(decision.prefill)
    assert len(set(chosen)) == 1


def test_cold_requests_take_turns() -> None:
    round_robin = ColdRoundRobin()
    chosen = []
    for seed in range(40):
        prefill = tuple(PrefillWorker(f"p{i}", last_cold=round_robin.last_number(f"p{i}")) for i in range(4))
        decision = place(PlacementRequest(500, seed), PlacementFleet(prefill, (DecodeWorker("d0"),)))
        assert decision.cold
        round_robin.placed(decision.prefill)
        chosen.append(decision.prefill)
    assert Counter(chosen) == {f"p{i}": 10 for i in range(4)}


def test_a_short_prompt_is_computed_on_decode_when_prefill_is_far_behind() -> None:
    busy = PlacementFleet(
        (PrefillWorker("p0", queued_tokens=50_000),), (DecodeWorker("d0"), DecodeWorker("d1", sequences=9))
    )
    turn = PlacementRequest(
        8_000, 0, decode_expected_tokens={"d0": 7_900, "d1": 7_900}, may_skip_prefill=True
    )
    decision = place(turn, busy)
    assert (decision.prefill, decision.decode, decision.uncached_tokens) == ("", "d0", 100)
    assert "prefill wait is 25000.0 ms longer on p0 with d0" in decision.reason
    long = replace(turn, decode_expected_tokens={"d0": 8_000 - LOCAL_MAX_TOKENS - 1})
    assert place(long, busy).prefill == "p0"
    assert place(replace(turn, may_skip_prefill=False), busy).prefill == "p0"


def test_a_region_that_holds_the_session_is_used_until_it_is_full() -> None:
    def fleet(queued: int) -> PlacementFleet:
        return PlacementFleet(
            (PrefillWorker("here"), PrefillWorker("there", region="far", queued_tokens=queued)),
            (DecodeWorker("d-here"), DecodeWorker("d-there", region="far")),
            region_ms={"far": 100.0},
        )

    held = PlacementRequest(10_000, 0, prefill_expected_tokens={"there": 9_900})
    assert place(held, fleet(0)).decode == "d-there"
    assert place(held, fleet(30_000)).decode == "d-here"
    assert place(PlacementRequest(10_000, 0), fleet(0)).decode == "d-here"

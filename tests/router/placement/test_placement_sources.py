"""Properties of the parts of a price: whose turn it is on a prefill worker, and where KV is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.router.placement.cost_model import PrefillModel
from services.router.placement.kv_source import KvSource, find_sources
from services.router.placement.policy import place
from services.router.placement.prefill_queue import queue_delay
from services.router.placement.types import (
    DecodeWorker,
    HeldTokens,
    KvStore,
    PlacementFleet,
    PlacementRequest,
    PrefillWorker,
)

tokens = st.integers(0, 100_000)
rates = st.sampled_from([0.001, 0.02, 1.0, 50.0])


@st.composite
def workers(draw: st.DrawFn) -> PrefillWorker:
    return PrefillWorker(
        "p0",
        queued_tokens=draw(tokens),
        queued_requests=draw(st.integers(0, 9)),
        queue=tuple(draw(st.lists(tokens, max_size=5))),
    )


def delay_tokens(uncached: int, worker: PrefillWorker) -> float:
    """The tokens that the prompt waits for, and those of this prompt that others wait for."""
    ahead_tokens, _, _, delays, _ = queue_delay(worker, uncached, uncached)
    return ahead_tokens + delays * uncached


def best_read(
    request: PlacementRequest, fleet: PlacementFleet, *, held: int, model: PrefillModel
) -> tuple[KvSource | None, float]:
    """The source of a worker of the group without names, and the time to read it and compute the rest."""
    compute_ms = model.compute_ms(request.prompt_tokens - held, request.prompt_tokens)
    sources = find_sources(request, fleet).get(("", ""))
    if sources is None:
        return None, compute_ms
    source, load_ms, rest_ms = sources.best_read(held, compute_ms, model)
    return source, load_ms + rest_ms


@given(workers(), st.integers(1, 100_000), tokens)
def test_a_longer_queue_never_costs_less(worker: PrefillWorker, uncached: int, more: int) -> None:
    longer = [
        replace(worker, queued_tokens=worker.queued_tokens + more),
        replace(
            worker,
            queued_tokens=worker.queued_tokens + more,
            queued_requests=worker.queued_requests + 1,
            queue=(*worker.queue, more),
        ),
    ]
    for each in longer:
        assert delay_tokens(uncached, each) >= delay_tokens(uncached, worker) * (1 - 1e-9)
        assert queue_delay(each, uncached, uncached)[4] >= queue_delay(worker, uncached, uncached)[4]


@given(workers(), st.integers(1, 100_000), st.integers(0, 10_000))
def test_a_longer_prompt_never_waits_less(worker: PrefillWorker, uncached: int, more: int) -> None:
    before, after = (queue_delay(worker, each, 200_000) for each in (uncached, uncached + more))
    assert after[0] >= before[0]  # tokens ahead
    assert after[2] <= before[2]  # tokens of longer prompts


@given(st.lists(st.integers(1, 100_000)), st.integers(1, 100_000), st.integers(0, 50_000))
def test_a_delay_counts_by_what_the_delayed_one_needs(queue: list[int], uncached: int, more: int) -> None:
    worker = PrefillWorker("p0", queued_tokens=sum(queue), queued_requests=len(queue), queue=tuple(queue))
    ahead_tokens, _, longer_tokens, delays, _ = queue_delay(worker, uncached, uncached)
    longer = [tokens for tokens in queue if tokens > uncached]
    assert 0.0 <= delays <= len(longer)
    assert (ahead_tokens, longer_tokens) == (sum(queue) - sum(longer), sum(longer))
    further = [tokens + more if tokens > uncached else tokens for tokens in queue]
    again = PrefillWorker("p0", queued_requests=len(queue), queue=tuple(further))
    tokens_then, _, _, delays_then, _ = queue_delay(again, uncached, uncached)
    assert delays_then <= delays and tokens_then == ahead_tokens


@given(
    st.integers(2, 100_000),
    st.data(),
    st.dictionaries(st.sampled_from(["p0", "p1", "p2"]), st.integers(0, 100_000), max_size=3),
)
def test_a_source_saves_time_and_is_one_that_may_be_read(
    prompt: int, data: st.DataObject, lent: dict[str, int]
) -> None:
    draw = data.draw
    model = PrefillModel(
        dram_token_ms=draw(rates), nvme_token_ms=draw(rates), peer_token_ms=draw(rates), token_ms=0.5
    )
    fleet = PlacementFleet(
        tuple(
            PrefillWorker(
                f"p{i}", fingerprint=draw(st.sampled_from("AAB")), refused=draw(st.sampled_from(["", "no"]))
            )
            for i in range(3)
        ),
        stores=(KvStore("k0", refused=draw(st.sampled_from(["", "no"]))),),
    )
    stored = draw(tokens)
    request = PlacementRequest(
        prompt,
        fingerprint="A",
        prefill_lendable_tokens=lent,
        store_held={"k0": HeldTokens(stored, draw(st.integers(0, stored)))},
    )
    held = draw(st.integers(0, prompt - 1))
    able = {w.instance for w in fleet.prefill if not w.refused and w.fingerprint == "A"}
    source, total_ms = best_read(request, fleet, held=held, model=model)
    assert total_ms <= model.compute_ms(prompt - held, prompt)
    if source is None:
        return
    assert held < source.tokens <= prompt - 1
    if source.is_peer:
        assert source.instance in able
        assert source.tokens <= lent[source.instance]
    else:
        assert not fleet.stores[0].refused and source.tokens <= stored
    # More to read there is never dearer.
    richer = replace(
        request, prefill_lendable_tokens={**lent, source.instance: prompt} if source.is_peer else lent
    )
    assert best_read(richer, fleet, held=held, model=model)[1] <= total_ms + 1e-6


def test_kv_comes_from_a_peer_where_its_own_worker_is_busy() -> None:
    fleet = PlacementFleet(
        (PrefillWorker("p0", queued_tokens=50_000), PrefillWorker("p1"), PrefillWorker("p2")),
        (DecodeWorker("d0"),),
    )
    request = PlacementRequest(
        10_000, 0, prefill_expected_tokens={"p0": 9_000, "p1": 1_000}, prefill_lendable_tokens={"p0": 8_000}
    )
    decision = place(request, fleet)
    assert (decision.peer, decision.source, decision.cached_tokens) == ("p0", "p0", 8_000)
    assert decision.prefill in ("p1", "p2") and decision.kvstore == ""
    # What it is only about to hold cannot be read; a kvstore that has as much is read rather than a worker.
    assert place(replace(request, prefill_lendable_tokens={}), fleet).peer == ""
    stored = replace(request, store_held={"k0": HeldTokens(8_000, 8_000)})
    with_store = place(stored, replace(fleet, stores=(KvStore("k0"),)))
    assert (with_store.peer, with_store.source, with_store.kvstore) == ("", "k0", "k0")
    # Nor is it read where that takes longer than computing.
    slow = PrefillWorker("p1", model=PrefillModel(peer_token_ms=50.0))
    assert place(request, replace(fleet, prefill=(fleet.prefill[0], slow))).peer == ""


def test_a_short_prompt_goes_before_long_ones_and_they_wait_for_it() -> None:
    worker = PrefillWorker("p0", queued_tokens=50_500, queued_requests=2, queue=(50_000, 500))
    assert queue_delay(worker, 1_000, 1_000)[:4] == (500, 1, 50_000, 1_000 / 50_000)
    assert queue_delay(worker, 50_000, 50_000)[:4] == (50_500, 2, 0, 0.0)
    # Others' requests are known in all: here two of 3,000 tokens each.
    shared = replace(worker, queued_tokens=56_500, queued_requests=4)
    longer_tokens, delays = 50_000 + 6_000 - 2 * 1_000, 2 + 1_000 / 50_000
    assert queue_delay(shared, 1_000, 1_000)[:4] == (500, 1, longer_tokens, delays)
    assert queue_delay(shared, 3_000, 3_000)[:4] == (6_500, 3, 50_000, 3_000 / 50_000)
    decision = place(PlacementRequest(1_000, 0), PlacementFleet((worker,), (DecodeWorker("d0"),)))
    leg = next(leg for leg in decision.candidates if leg.part == "prefill")
    assert leg.cost.queue_ms == worker.model.queue_ms(500, 1, 50_000)
    assert leg.cost.others_ms == pytest.approx(worker.model.queue_ms(1_000, 1) / 50)


def test_a_peer_is_not_disturbed_for_what_it_saves_of_a_stores_time_within_the_error() -> None:
    rates = PrefillModel(dram_token_ms=0.011, peer_token_ms=0.01, token_ms=1.0)
    for tokens, peer in ((2_000, False), (8_000, True)):
        request = PlacementRequest(
            prompt_tokens=tokens + 64,
            fingerprint="fp",
            prefill_lendable_tokens={"p0": tokens},
            store_held={"k0": HeldTokens(tokens, tokens)},
        )
        prefill = tuple(PrefillWorker(name, fingerprint="fp") for name in ("p0", "p1"))
        fleet = PlacementFleet(prefill, (), (KvStore("k0"),))
        source, _ = best_read(request, fleet, held=0, model=rates)
        assert source is not None and source.is_peer is peer
        source, _ = best_read(request, replace(fleet, stores=()), held=0, model=rates)
        assert source is not None and source.is_peer


def test_what_a_worker_is_only_about_to_hold_is_read_where_it_is() -> None:
    """A sibling went to p0, whose read of p1's blocks has not ended: the next one names p1 as well."""
    fleet = PlacementFleet(
        (PrefillWorker("p0"), PrefillWorker("p1", queued_tokens=50_000)), (DecodeWorker("d0"),)
    )
    request = PlacementRequest(
        10_000,
        prefill_expected_tokens={"p0": 9_500, "p1": 9_000},
        prefill_confirmed_tokens={"p0": 0, "p1": 9_000},
        prefill_lendable_tokens={"p0": 0, "p1": 9_000},
    )
    decision = place(request, fleet)
    assert (decision.prefill, decision.peer) == ("p0", "p1")
    assert (decision.cached_tokens, decision.uncached_tokens) == (9_500, 500)
    # Not where its reports hold as much, nor where no other worker has it: then a sibling computes it.
    assert place(replace(request, prefill_confirmed_tokens={"p0": 9_500}), fleet).peer == ""
    alone = place(replace(request, prefill_lendable_tokens={"p0": 0}), fleet)
    assert (alone.prefill, alone.peer, alone.cached_tokens) == ("p0", "", 9_500)
    # A worker without a report counts with what it is predicted to hold.
    assert place(replace(request, prefill_confirmed_tokens={}), fleet).peer == ""


@given(st.integers(2, 50_000), st.data())
def test_a_prediction_is_insured_exactly_when_a_read_would_save_time(
    prompt: int, data: st.DataObject
) -> None:
    held = data.draw(st.integers(0, prompt))
    told = data.draw(st.integers(0, held))
    lent = data.draw(st.integers(0, prompt))
    model = PrefillModel(peer_token_ms=data.draw(rates))
    fleet = PlacementFleet(
        (PrefillWorker("p0", model=model), PrefillWorker("p1", refused="no", model=model)),
        (DecodeWorker("d0"),),
    )
    lender = replace(fleet, prefill=(fleet.prefill[0], PrefillWorker("p1", queued_tokens=10**9, model=model)))
    request = PlacementRequest(
        prompt,
        prefill_expected_tokens={"p0": held},
        prefill_confirmed_tokens={"p0": told},
        prefill_lendable_tokens={"p1": lent},
    )
    decision = place(request, lender)
    assert decision.prefill == "p0"
    there, known = min(lent, prompt - 1), min(told, prompt - 1)
    read_ms = model.load_ms(0, 0, there - known) + model.compute_ms(prompt - there, prompt)
    pays = there > known and read_ms < model.compute_ms(prompt - known, prompt)
    assert (decision.peer == "p1") == pays
    cached = max(held, there) if pays else held
    assert decision.cached_tokens == min(cached, prompt - 1)
    assert place(request, fleet).peer == ""  # a refused worker lends nothing


def test_kv_comes_from_a_store_where_loading_beats_computing() -> None:
    fleet = PlacementFleet((PrefillWorker("p0"),), (DecodeWorker("d0"),), (KvStore("k0"), KvStore("k1")))
    stored = PlacementRequest(
        10_000, 0, store_held={"k0": HeldTokens(2_000, 2_000), "k1": HeldTokens(9_000, 9_000)}
    )
    decision = place(stored, fleet)
    assert (decision.source, decision.kvstore, decision.cached_tokens) == ("k1", "k1", 9_000)
    slow = replace(fleet, prefill=(PrefillWorker("p0", model=PrefillModel(dram_token_ms=50.0)),))
    assert place(stored, slow).source == "nothing"


def test_equal_content_meets_at_one_kvstore_and_different_content_spreads() -> None:
    fleet = PlacementFleet(
        (PrefillWorker("p0"),), (DecodeWorker("d0"),), tuple(KvStore(f"k{i}") for i in range(3))
    )
    stores = [place(PlacementRequest(10, seed, content_key=b"same"), fleet).kvstore for seed in range(20)]
    assert len(set(stores)) == 1
    assert (
        len({place(PlacementRequest(10, 0, content_key=bytes([i])), fleet).kvstore for i in range(50)}) == 3
    )

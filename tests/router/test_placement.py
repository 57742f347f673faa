"""Properties of placement: it is deterministic, bounded in load, and affinity yields."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.common.errors import Unavailable
from services.router.placement import LOAD_BOUND, DecodeLoad, FleetLoad, PrefillLoad, Wish, place

counts = st.integers(0, 200_000)
rates = st.sampled_from([0.0, 500.0, 4_000.0])


@st.composite
def fleets(draw: st.DrawFn, *, min_prefill: int = 1) -> FleetLoad:
    n_prefill, n_decode = draw(st.integers(min_prefill, 6)), draw(st.integers(1, 6))
    return FleetLoad(
        prefill=tuple(PrefillLoad(f"p{i}", draw(counts), draw(rates)) for i in range(n_prefill)),
        decode=tuple(
            DecodeLoad(f"d{i}", draw(counts), draw(st.sampled_from([0.0, 5.0, 50.0])))
            for i in range(n_decode)
        ),
        kvstores=tuple(f"k{i}" for i in range(draw(st.integers(0, 3)))),
    )


@st.composite
def wishes(draw: st.DrawFn) -> Wish:
    prompt_tokens = draw(st.integers(1, 100_000))
    return Wish(
        prompt_tokens=prompt_tokens,
        seed=draw(st.integers(0, 1 << 32)),
        stored_tokens=draw(st.integers(0, prompt_tokens - 1)),
        last_prefill=draw(st.sampled_from(["", "p0", "p1", "gone"])),
        last_decode=draw(st.sampled_from(["", "d0", "d1", "gone"])),
        kvstore=draw(st.sampled_from(["", "k0", "gone"])),
        content_key=draw(st.binary(max_size=4)),
    )


@given(wishes(), fleets())
@settings(max_examples=200, deadline=None)
def test_the_same_request_and_fleet_give_the_same_workers_of_the_fleet(wish: Wish, fleet: FleetLoad) -> None:
    decision = place(wish, fleet)
    assert decision == place(wish, fleet)
    assert decision.prefill in {worker.instance for worker in fleet.prefill}
    assert decision.decode in {worker.instance for worker in fleet.decode}
    assert decision.kvstore in ({*fleet.kvstores} or {""})
    assert decision.prefill in decision.reason
    assert decision.decode in decision.reason


@given(wishes(), fleets())
@settings(max_examples=200, deadline=None)
def test_no_worker_gets_more_than_the_bound_allows(wish: Wish, fleet: FleetLoad) -> None:
    decision = place(wish, fleet)
    for workers, chosen, incoming in (
        (fleet.prefill, decision.prefill, wish.prompt_tokens - wish.stored_tokens),
        (fleet.decode, decision.decode, wish.prompt_tokens),
    ):
        loads = {worker.instance: worker.tokens_in_flight for worker in workers}
        fair = (sum(loads.values()) + incoming) / len(loads)
        assert loads[chosen] <= LOAD_BOUND * fair


@given(wishes(), fleets(), st.permutations(range(6)))
@settings(max_examples=100, deadline=None)
def test_the_order_of_workers_does_not_matter(wish: Wish, fleet: FleetLoad, order: list[int]) -> None:
    shuffled = replace(fleet, decode=tuple(fleet.decode[i] for i in order if i < len(fleet.decode)))
    assert place(wish, shuffled) == place(wish, fleet)


@given(st.integers(2, 6), st.integers(64, 50_000), st.integers(0, 1 << 32))
def test_an_idle_fleet_goes_back_to_where_the_kv_is(n: int, tokens: int, seed: int) -> None:
    fleet = FleetLoad(
        tuple(PrefillLoad(f"p{i}") for i in range(n)), tuple(DecodeLoad(f"d{i}") for i in range(n))
    )
    wish = Wish(tokens, seed, stored_tokens=tokens // 2, last_prefill="p1", last_decode="d1")
    decision = place(wish, fleet)
    assert (decision.prefill, decision.decode) == ("p1", "d1")


def test_affinity_yields_to_load() -> None:
    fleet = FleetLoad(
        (PrefillLoad("p0", 100_000), PrefillLoad("p1")), (DecodeLoad("d0", 100_000), DecodeLoad("d1"))
    )
    wish = Wish(1000, 1, stored_tokens=900, last_prefill="p0", last_decode="d0")
    decision = place(wish, fleet)
    assert (decision.prefill, decision.decode) == ("p1", "d1")
    assert "p0 holds the session's KV but is busier" in decision.reason


@given(st.integers(2, 5), st.lists(st.integers(100, 2000), min_size=20, max_size=60))
@settings(max_examples=50, deadline=None)
def test_a_burst_is_spread_within_the_bound(n: int, sizes: list[int]) -> None:
    """Requests placed one after the other, none ending: what the router counts as it sends is enough."""
    loads = dict.fromkeys((f"p{i}" for i in range(n)), 0)
    for seed, size in enumerate(sizes):
        fleet = FleetLoad(tuple(PrefillLoad(name, load) for name, load in loads.items()), (DecodeLoad("d0"),))
        loads[place(Wish(size, seed, last_prefill="p0"), fleet).prefill] += size
        assert max(loads.values()) <= LOAD_BOUND * sum(loads.values()) / n + max(sizes)


def test_cold_requests_spread_over_equal_workers() -> None:
    fleet = FleetLoad(tuple(PrefillLoad(f"p{i}") for i in range(4)), (DecodeLoad("d0"),))
    chosen = Counter(place(Wish(500, seed), fleet).prefill for seed in range(400))
    assert min(chosen.values()) > 60


def test_equal_content_meets_at_one_kvstore_and_different_content_spreads() -> None:
    fleet = FleetLoad((PrefillLoad("p0"),), (DecodeLoad("d0"),), ("k0", "k1", "k2"))
    stores = [place(Wish(10, seed, content_key=b"same"), fleet).kvstore for seed in range(20)]
    assert len(set(stores)) == 1
    assert len({place(Wish(10, 0, content_key=bytes([i])), fleet).kvstore for i in range(50)}) == 3


def test_missing_tiers_are_unavailable_unless_decode_may_do_it_all() -> None:
    with pytest.raises(Unavailable, match="no decode"):
        place(Wish(1, 0), FleetLoad((PrefillLoad("p0"),), ()))
    alone = FleetLoad((), (DecodeLoad("d0"),))
    with pytest.raises(Unavailable, match="no prefill"):
        place(Wish(1, 0), alone)
    assert place(Wish(1, 0, may_skip_prefill=True), alone).prefill == ""
    with pytest.raises(Unavailable, match="p9"):
        place(Wish(1, 0, pinned_prefill="p9"), FleetLoad((PrefillLoad("p0"),), (DecodeLoad("d0"),)))


def test_the_command_prints_a_decision(tmp_path: Path) -> None:
    fleet = {"prefill": [{"instance": "p0"}], "decode": [{"instance": "d0"}], "kvstores": ["k0"]}
    (tmp_path / "fleet.json").write_text(json.dumps(fleet))
    (tmp_path / "request.json").write_text(json.dumps({"prompt_tokens": 100, "seed": 1}))
    command = [sys.executable, "-m", "services.router.placement", "fleet.json", "request.json"]
    root = Path(__file__).resolve().parents[2]
    made = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(root)}, capture_output=True, check=True, timeout=60
    )
    decision = json.loads(made.stdout)
    assert (decision["prefill"], decision["decode"], decision["kvstore"]) == ("p0", "d0", "k0")

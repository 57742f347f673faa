"""Which pods get a new deletion cost."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from slipstream.pod_costs.decision import (
    DEAD_BAND,
    MAX_WRITES,
    MIN_INTERVAL_S,
    CostedPod,
    CostWrite,
    cost_writes,
)

costs = st.integers(0, 400)
names = st.lists(st.integers(0, 99), unique=True, max_size=8)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[CostedPod], dict[tuple[str, str], int]]:
    """Pods, and the wanted costs of most of them and of some that are gone."""
    pods = [
        CostedPod(draw(st.sampled_from(["prefill", "decode"])), f"p{n}", f"u{n}", draw(st.none() | costs))
        for n in draw(names)
    ]
    wanted = {(pod.tier, pod.name): draw(costs) for pod in pods if draw(st.booleans())}
    return pods, wanted | {("decode", "gone"): 9}


def applied(pods: list[CostedPod], writes: list[CostWrite]) -> list[CostedPod]:
    """The pods after the writes."""
    new = {write.pod.uid: write.cost for write in writes}
    return [replace(pod, cost=new.get(pod.uid, pod.cost)) for pod in pods]


@given(fleets())
def test_one_round_brings_every_pod_near_its_cost_and_the_next_one_writes_nothing(
    fleet: tuple[list[CostedPod], dict[tuple[str, str], int]],
) -> None:
    pods, wanted = fleet
    writes = cost_writes(pods, wanted, wanted, {}, started_s=0.0, now_s=MIN_INTERVAL_S)
    assert {write.pod.uid for write in writes} <= {pod.uid for pod in pods}
    after = applied(pods, writes)
    for pod, before in zip(after, pods, strict=True):
        cost = wanted.get((pod.tier, pod.name))
        assert pod.cost == before.cost if cost is None else abs((pod.cost or 0) - cost) <= DEAD_BAND
    assert cost_writes(after, wanted, wanted, {}, started_s=0.0, now_s=1e6) == []


@given(fleets(), st.data())
def test_a_pod_is_written_at_most_once_a_minute_by_writers_that_restart(
    fleet: tuple[list[CostedPod], dict[tuple[str, str], int]], data: st.DataObject
) -> None:
    pods, wanted = fleet
    now_s = started_s = 0.0
    memory: dict[str, float] = {}  # of the writer that runs
    times: dict[str, list[float]] = {}  # of all writers
    for _ in range(12):
        now_s += data.draw(st.sampled_from([1.0, 15.0, 59.0, 61.0]))
        if data.draw(st.booleans()):
            started_s, memory = now_s, {}
        wanted = {key: data.draw(costs) for key in wanted}
        writes = cost_writes(pods, wanted, wanted, memory, started_s=started_s, now_s=now_s)
        pods = applied(pods, writes)
        for write in writes:
            memory[write.pod.uid] = now_s
            times.setdefault(write.pod.uid, []).append(now_s)
    for written_s in times.values():
        gaps = [after - before for before, after in itertools.pairwise(written_s)]
        assert all(gap >= MIN_INTERVAL_S for gap in gaps)


@given(costs, costs)
def test_settled_costs_keep_the_order_of_wanted_ones_beyond_the_dead_band(one: int, other: int) -> None:
    pods = [CostedPod("decode", "a", "a", 100), CostedPod("decode", "b", "b", 100)]
    wanted = {("decode", "a"): one, ("decode", "b"): other}
    a, b = applied(pods, cost_writes(pods, wanted, wanted, {}, started_s=0.0, now_s=60.0))
    if one > other + 2 * DEAD_BAND:
        assert a.cost is not None and b.cost is not None and a.cost > b.cost


def test_a_change_within_the_dead_band_is_no_write() -> None:
    pods = [CostedPod("decode", "a", "a", 20)]
    for cost, n_writes in ((20 + DEAD_BAND, 0), (20 - DEAD_BAND, 0), (20 + DEAD_BAND + 1, 1)):
        wanted = {("decode", "a"): cost}
        assert len(cost_writes(pods, wanted, wanted, {}, started_s=0.0, now_s=60.0)) == n_writes


def test_the_name_of_another_tier_is_another_worker() -> None:
    pods = [CostedPod("decode", "a", "a", 0)]
    wanted = {("prefill", "a"): 50}
    assert cost_writes(pods, wanted, wanted, {}, started_s=0.0, now_s=60.0) == []


@given(fleets(), st.data())
def test_what_one_round_alone_wants_is_not_written(
    fleet: tuple[list[CostedPod], dict[tuple[str, str], int]], data: st.DataObject
) -> None:
    pods, wanted = fleet
    before = {key: data.draw(costs) for key in wanted if data.draw(st.booleans())}
    for write in cost_writes(pods, wanted, before, {}, started_s=0.0, now_s=60.0):
        key, has = (write.pod.tier, write.pod.name), write.pod.cost or 0
        assert write.cost == wanted[key]
        assert abs(before[key] - has) > DEAD_BAND and abs(wanted[key] - has) > DEAD_BAND


def test_a_round_writes_the_largest_changes_first_and_not_all_at_once() -> None:
    pods = [CostedPod("decode", f"p{n}", f"u{n}") for n in range(MAX_WRITES + 10)]
    wanted = {("decode", f"p{n}"): 10 + n for n in range(MAX_WRITES + 10)}
    writes = cost_writes(pods, wanted, wanted, {}, started_s=0.0, now_s=60.0)
    assert [write.cost for write in writes] == sorted(wanted.values(), reverse=True)[:MAX_WRITES]

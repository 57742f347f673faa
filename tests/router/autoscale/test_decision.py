"""The recommendation for each tier: properties that hold for any fleet, and the signals one by one."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster.load_report import keep_plausible
from libs.common.cluster.worker_record import Role
from services.router.autoscale.decision import (
    is_active,
    prefill_per_decode,
    recommend,
    recommend_all,
)
from services.router.autoscale.types import Aims, AutoscalePolicy, TierLimits, WorkerLoad
from slipstream.v1 import worker_pb2
from tests.router.autoscale.loads import FLEETS, SEEDS, more_load, tier, worker

MIB = 1 << 20
RATES_AND_SHARES = ("prefill_tokens_per_s", "decode_step_ms", "busy_share", "event_loop_delay_ms")
POLICY = AutoscalePolicy(limits={role: TierLimits(1, 10_000) for role in Role})
BUSY = 0.5


def wanted(fleet: list[WorkerLoad], role: Role) -> int:
    return recommend(fleet, role, POLICY).wanted


# ---- of any fleet


@given(FLEETS, SEEDS)
def test_more_load_never_recommends_fewer(fleet: list[WorkerLoad], seed: int) -> None:
    loaded = more_load(fleet, seed)
    for role in Role:
        assert wanted(loaded, role) >= wanted(fleet, role), role


@given(FLEETS, st.integers(0, 5), st.integers(5, 9))
def test_recommendations_satisfy_hpas_formula_within_the_limits(
    fleet: list[WorkerLoad], least: int, most: int
) -> None:
    limits = {role: TierLimits(least, most) for role in Role}
    for found in recommend_all(fleet, AutoscalePolicy(limits=limits)):
        by_formula = math.ceil(found.replicas * found.signal.value / found.signal.target - 1e-9)
        assert found.wanted == min(max(by_formula, least, int(found.active)), most)


@given(FLEETS)
def test_kvstores_are_never_fewer(fleet: list[WorkerLoad]) -> None:
    found = recommend(fleet, Role.KVSTORE, POLICY)
    assert found.wanted >= found.replicas


def test_the_reason_of_kvstores_has_the_measured_figure() -> None:
    found = recommend([worker(Role.KVSTORE, evicted_wanted_bytes_per_s=3.0 * MIB)], Role.KVSTORE, POLICY)
    assert found.signal.value == found.signal.target
    assert "measured 3," in found.reason


@given(FLEETS, st.sampled_from(list(Role)))
def test_draining_workers_count_for_nothing(fleet: list[WorkerLoad], role: Role) -> None:
    there = [each for each in fleet if each.report is None or not each.report.draining]
    assert recommend(fleet, role, POLICY) == recommend(there, role, POLICY)


@given(FLEETS, st.randoms())
def test_the_order_of_the_reports_does_not_matter(fleet: list[WorkerLoad], random: Any) -> None:
    other = list(fleet)
    random.shuffle(other)
    for mine, theirs in zip(recommend_all(fleet, POLICY), recommend_all(other, POLICY), strict=True):
        assert mine.wanted == theirs.wanted
        assert mine.load == pytest.approx(theirs.load)


def in_processes(fleet: list[WorkerLoad], n: int) -> list[WorkerLoad]:
    """The fleet with each router as n processes at one address, each as busy as the router was."""
    routers = [each for each in fleet if each.role is Role.ROUTER]
    processes = [
        replace(each, instance=f"{each.instance}.{number}", endpoint=f"{each.instance}:7000")
        for each in routers
        for number in range(n)
    ]
    return [each for each in fleet if each.role is not Role.ROUTER] + processes


@given(FLEETS, st.integers(1, 5))
def test_routers_of_several_processes_count_as_routers(fleet: list[WorkerLoad], n: int) -> None:
    one, several = (recommend(each, Role.ROUTER, POLICY) for each in (fleet, in_processes(fleet, n)))
    assert (several.replicas, several.wanted) == (one.replicas, one.wanted)
    assert several.load == pytest.approx(one.load)


@pytest.mark.parametrize(("busy", "expected"), [(0.7, 3), (0.75, 3), (0.9, 4), (0.3, 2)])
def test_an_hpa_that_counts_pods_of_four_processes_settles(busy: float, expected: int) -> None:
    pods = tier(Role.ROUTER, 3, busy_share=busy)
    found = recommend(in_processes(pods, 4), Role.ROUTER, POLICY)
    assert (found.replicas, found.wanted) == (3, expected)


def test_a_router_whose_first_process_drains_is_still_one() -> None:
    first, *others = in_processes(tier(Role.ROUTER, 1, busy_share=0.6), 3)
    draining = replace(first, report=worker_pb2.LoadReport(busy_share=0.6, draining=True))
    assert recommend([draining, *others], Role.ROUTER, POLICY).replicas == 1


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.KVSTORE])
def test_an_idle_fleet_wants_the_least(role: Role) -> None:
    fleet = [each for every in Role for each in tier(every, 4, decode_step_ms=45.0, blocks_free=100)]
    for least in (0, 1, 2):
        found = recommend(fleet, role, AutoscalePolicy(limits={role: TierLimits(least, 8)}))
        assert found.wanted == max(least, int(role is Role.ROUTER))


@given(st.floats(), st.integers(0, (1 << 40)))
def test_one_false_worker_hides_no_load_of_the_others(figure: float, blocks: int) -> None:
    """Three of four workers need more of their tier, whatever the fourth one says."""
    loads: dict[Role, dict[str, Any]] = {
        Role.PREFILL: {"requests_running": 2, "prefill_tokens_in_flight": 10**6, "prefill_tokens_per_s": 1e4},
        Role.DECODE: {"blocks_held": 90, "blocks_free": 10},
        Role.ROUTER: {"busy_share": 1.0},
    }
    drafters = tier(Role.DRAFTER, 4, busy_share=BUSY)
    late = tier(Role.DECODE, 3, drafts_due_per_s=100.0, drafts_missed_per_s=50.0)
    liar = worker(Role.DECODE, 3, drafts_due_per_s=figure, drafts_missed_per_s=0.0)
    assert liar.report is not None
    keep_plausible(liar.report)
    assert wanted([*drafters, *late, liar], Role.DRAFTER) > 4
    for role, fields in loads.items():
        false = worker(role, 3, blocks_free=blocks, **dict.fromkeys(RATES_AND_SHARES, figure))
        assert false.report is not None
        keep_plausible(false.report)
        found = recommend([*tier(role, 3, **fields), false], role, POLICY)
        assert found.wanted >= (3 if role is Role.DECODE else 4), found.reason
        assert found.wanted <= 10_000


# ---- targets can be reached: each signal alone asks for more than HPA tolerates

OVERLOADS: dict[str, tuple[Role, list[WorkerLoad]]] = {
    "queued_s": (
        Role.PREFILL,
        [
            worker(
                Role.PREFILL,
                requests_running=2,
                prefill_tokens_in_flight=60_000,
                prefill_tokens_per_s=1e4,
            )
        ],
    ),
    "kv_share": (Role.DECODE, [worker(Role.DECODE, requests_running=2, blocks_held=100)]),
    "batch_share": (Role.DECODE, [worker(Role.DECODE, requests_running=64, requests_waiting=1)]),
    "step_ms": (Role.DECODE, [worker(Role.DECODE, requests_running=8, decode_step_ms=60.0)]),
    "missed_share": (
        Role.DRAFTER,
        [
            worker(Role.DECODE, drafts_due_per_s=100, drafts_missed_per_s=20),
            worker(Role.DRAFTER, busy_share=BUSY),
        ],
    ),
    "loop_busy_share": (Role.ROUTER, [worker(Role.ROUTER, busy_share=0.95)]),
    "loop_delay_ms": (Role.ROUTER, [worker(Role.ROUTER, busy_share=BUSY, event_loop_delay_ms=30.0)]),
    "requests_share": (
        Role.ROUTER,
        [worker(Role.ROUTER, requests_running=4, requests_admitted=4, requests_allowed=4)],
    ),
    "evicted_wanted_mib_per_s": (
        Role.KVSTORE,
        [worker(Role.KVSTORE, evicted_wanted_bytes_per_s=100.0 * MIB)],
    ),
}


@pytest.mark.parametrize("name", OVERLOADS)
def test_each_signal_reaches_its_target(name: str) -> None:
    role, fleet = OVERLOADS[name]
    found = recommend(fleet, role, POLICY)
    assert found.signal.name == name
    assert found.signal.load > 1.1
    assert found.wanted == 2
    assert f"aim {found.signal.target:.3g}" in found.reason


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DRAFTER, Role.ROUTER])
def test_a_busy_tier_grows_before_anything_waits(role: Role) -> None:
    assert wanted(tier(role, 4, busy_share=0.9), role) == 5
    assert wanted(tier(role, 4, busy_share=0.3), role) == 2


def test_prompts_that_wait_at_routers_count_as_queued() -> None:
    fleet = tier(
        Role.PREFILL, 2, prefill_tokens_per_s=1e4, prefill_tokens_in_flight=20_000, requests_running=2
    )
    assert wanted(fleet, Role.PREFILL) == 1
    waiting = [*fleet, *tier(Role.ROUTER, 2, prefill_tokens_in_flight=40_000)]
    found = recommend(waiting, Role.PREFILL, POLICY)
    assert found.signal.value == pytest.approx(5.0)
    assert found.wanted == 5


def test_waits_for_places_of_decode_count_at_its_workers() -> None:
    decode = tier(Role.DECODE, 1, requests_running=64)
    routers = tier(Role.ROUTER, 2, requests_waiting=40, requests_waiting_decode=32)
    assert recommend([*decode, *routers], Role.DECODE, POLICY).signal.value == pytest.approx(2.0)
    assert wanted([*decode, *routers], Role.DECODE) == 3


@given(FLEETS, st.integers(0, 10_000))
def test_waits_for_a_routers_own_limit_want_no_workers(fleet: list[WorkerLoad], n: int) -> None:
    """Such a router reports its queue, and neither tokens nor requests that workers could take."""
    full = worker(Role.ROUTER, 9, requests_running=4, requests_admitted=4, requests_allowed=4)
    queued = worker(
        Role.ROUTER, 9, requests_running=4, requests_admitted=4, requests_allowed=4, requests_waiting=n
    )
    for role in (Role.PREFILL, Role.DECODE):
        assert recommend([*fleet, queued], role, POLICY) == recommend([*fleet, full], role, POLICY)


def test_a_router_at_its_limit_wants_another_one_and_says_why() -> None:
    limited = worker(
        Role.ROUTER, requests_running=4, requests_admitted=4, requests_allowed=4, requests_waiting=26
    )
    fleet = [limited, worker(Role.PREFILL), worker(Role.DECODE, requests_running=4)]
    found = recommend(fleet, Role.ROUTER, POLICY)
    assert found.reason == "1 of the requests admitted that a router may run at once, aim 0.8"
    assert [each.wanted for each in recommend_all(fleet, POLICY)][:3] == [2, 1, 1]


def test_what_more_processes_would_not_mend_asks_for_none() -> None:
    prompt = worker(Role.PREFILL, requests_running=1, prefill_tokens_in_flight=10**6)
    assert wanted([prompt], Role.PREFILL) == 1
    alone = [worker(Role.DECODE, requests_running=1, decode_step_ms=500.0)]
    assert wanted(alone, Role.DECODE) == 1
    late = tier(Role.DECODE, 1, drafts_due_per_s=100, drafts_missed_per_s=90)
    assert wanted([*late, *tier(Role.DRAFTER, 2, busy_share=0.1)], Role.DRAFTER) == 1
    assert wanted(tier(Role.ROUTER, 2, busy_share=0.1, event_loop_delay_ms=500.0), Role.ROUTER) == 1


def test_a_process_without_a_report_counts_like_the_mean() -> None:
    silent = WorkerLoad(Role.PREFILL, "prefill-9", None)
    assert wanted([*tier(Role.PREFILL, 2, busy_share=0.75), silent], Role.PREFILL) == 3


def test_a_tier_of_which_no_report_arrives_keeps_its_size() -> None:
    found = recommend([WorkerLoad(Role.DECODE, f"decode-{n}", None) for n in range(5)], Role.DECODE, POLICY)
    assert found.wanted == 5
    assert "no replica reports" in found.reason


# ---- from none


ASKING: dict[str, worker_pb2.LoadReport] = {
    "running": worker_pb2.LoadReport(requests_running=1),
    "waiting": worker_pb2.LoadReport(requests_waiting=1),
    "unplaced": worker_pb2.LoadReport(requests_unplaced=1),
}


@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.DRAFTER])
def test_a_request_wakes_a_tier_without_workers(asking: str, role: Role) -> None:
    none = AutoscalePolicy(limits={role: TierLimits(0, 4)})
    idle = [WorkerLoad(Role.ROUTER, "router-0", worker_pb2.LoadReport())]
    assert not is_active(idle, role)
    assert recommend(idle, role, none).wanted == 0
    woken = [WorkerLoad(Role.ROUTER, "router-0", ASKING[asking])]
    assert is_active(woken, role)
    assert recommend(woken, role, none).wanted == 1


def test_routers_and_kvstores_are_always_active() -> None:
    assert is_active([], Role.ROUTER)
    assert is_active([], Role.KVSTORE)


# ---- the ratio, limits


def test_the_ratio_is_that_of_the_loads() -> None:
    fleet = [
        *tier(Role.PREFILL, 4, busy_share=0.75),
        *tier(Role.DECODE, 2, requests_running=8, decode_step_ms=25.0),
    ]
    assert prefill_per_decode(recommend_all(fleet, POLICY)) == pytest.approx(4.0)
    assert prefill_per_decode(recommend_all([], POLICY)) == 0.0


def test_limits_bound_the_wish_and_are_named() -> None:
    policy = AutoscalePolicy(Aims(), {Role.PREFILL: TierLimits(2, 3)})
    high = recommend(tier(Role.PREFILL, 3, busy_share=1.0), Role.PREFILL, policy)
    low = recommend(tier(Role.PREFILL, 3), Role.PREFILL, policy)
    assert (high.wanted, low.wanted) == (3, 2)
    assert "at most 3" in high.reason
    assert "at least 2" in low.reason


def test_a_tier_that_limits_leave_out_says_so() -> None:
    found = recommend([], Role.DRAFTER, AutoscalePolicy(limits={Role.DRAFTER: TierLimits(0, 0)}))
    assert (found.wanted, found.reason) == (0, "there is no replica; its limits leave the tier out")


# ---- jobs


def with_jobs(*, waiting: int, running: int, allowed: int, routers: int = 2) -> list[WorkerLoad]:
    """Routers of one queue before idle workers, one a tier."""
    jobs = {"jobs_waiting": waiting, "jobs_running": running, "jobs_allowed": allowed}
    return [*tier(Role.ROUTER, routers, **jobs), worker(Role.PREFILL), worker(Role.DECODE)]


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_waiting_jobs_raise_their_tiers_within_limits(role: Role) -> None:
    assert wanted(with_jobs(waiting=0, running=0, allowed=64), role) == 1
    # Both routers report one queue: 36 + 2 * 2 jobs for 16 a worker.
    assert wanted(with_jobs(waiting=36, running=2, allowed=64), role) == 3
    assert (
        wanted(with_jobs(waiting=100_000, running=0, allowed=64), role) == 8
    )  # what two routers run at once
    found = recommend(
        with_jobs(waiting=1000, running=0, allowed=64), role, AutoscalePolicy(limits={role: TierLimits(1, 2)})
    )
    assert (found.wanted, found.signal.name) == (2, "jobs")
    assert "at most 2 are allowed" in found.reason


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_jobs_that_wait_for_live_requests_raise_nothing(role: Role) -> None:
    assert wanted(with_jobs(waiting=1000, running=0, allowed=0), role) == 1


def test_jobs_alone_activate_prefill_and_decode_and_no_drafter() -> None:
    routers = tier(Role.ROUTER, 1, jobs_waiting=1, jobs_allowed=64)
    active = {role: is_active(routers, role) for role in (Role.PREFILL, Role.DECODE, Role.DRAFTER)}
    assert active == {Role.PREFILL: True, Role.DECODE: True, Role.DRAFTER: False}
    assert recommend(routers, Role.DECODE, POLICY).wanted == 1

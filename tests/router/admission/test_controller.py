"""The admission controller: bounded, work-conserving, ordered, free of starvation, deterministic."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.admission.controller import AdmissionController
from services.router.admission.forecast import Capacity
from services.router.admission.tenant_reserve import with_reserve
from services.router.admission.types import (
    AdmissionDecision,
    AdmissionLimits,
    AdmissionRequest,
    Priority,
    QueueChanges,
    Verdict,
    WantedWorkers,
)
from tests.support.examples import examples

UNKNOWN = Capacity()


def _limits(**changes: Any) -> AdmissionLimits:
    settings_: dict[str, Any] = {
        "max_running": 4,
        "max_waiting": dict.fromkeys(Priority, 6),
        "max_wait_ms": dict.fromkeys(Priority, 500.0),
        "promote_ms": dict(zip(Priority, (0.0, 100.0, 200.0, 300.0), strict=True)),
    }
    return AdmissionLimits(**{**settings_, **changes})


def _request(key: str, priority: Priority = Priority.DEFAULT, **more: Any) -> AdmissionRequest:
    return AdmissionRequest(key, more.pop("tenant", "t"), priority, prefill_tokens=10, **more)


def _drive(seed: int, steps: int) -> list[tuple[Any, ...]]:
    """Run a random history with checks at every step; return the controller's decisions."""
    rng, controller, limits = random.Random(seed), AdmissionController(_limits()), _limits()
    now_ms = 0.0
    decisions: list[tuple[str, AdmissionDecision | QueueChanges]] = []
    running: set[str] = set()
    shown: set[str] = set()
    waiting: dict[str, tuple[Priority, float]] = {}
    requests: dict[str, AdmissionRequest] = {}

    def poll() -> None:
        changes = controller.poll(UNKNOWN, now_ms)
        for key in changes.expired:
            # Before its maximum wait a request expires only if it cannot end before its deadline.
            assert now_ms >= waiting.pop(key)[1] or requests[key].deadline_ms is not None
        for key in changes.admitted:
            del waiting[key]
            running.add(key)
        decisions.append(("poll", changes))

    for step in range(steps):
        act = rng.random()
        now_ms += rng.choice([0.0, 1.0, 30.0])
        if act < 0.5:
            priority = rng.choice(list(Priority))
            deadline_ms = rng.choice([None, now_ms + 50.0, now_ms + 1000.0])
            may_wait, tenant = rng.random() < 0.9, rng.choice("ab")
            request = _request(
                f"k{step}", priority, tenant=tenant, may_wait=may_wait, deadline_ms=deadline_ms
            )
            requests[request.key] = request
            overtakes = any(p <= priority for p, _ in waiting.values())
            refusal = controller.refuses(request, UNKNOWN, now_ms)
            decision = controller.offer(request, UNKNOWN, now_ms)
            assert refusal == (decision if decision.verdict is Verdict.REFUSED else None)
            decisions.append(("offer", decision))
            for key in decision.preempted:
                victim = requests[key]
                assert key not in shown
                assert victim.may_wait
                assert victim.priority > priority
                running.remove(key)
                until_ms = min(victim.deadline_ms or now_ms + 500.0, now_ms + 500.0)
                waiting[key] = (victim.priority, until_ms)
            if decision.pushed_out:
                del waiting[decision.pushed_out]
            if decision.verdict is Verdict.ADMITTED:
                mine = [key for key in running if requests[key].tenant == tenant]
                assert not overtakes or 2 * (len(mine) + 1) <= limits.max_running
                running.add(request.key)
            elif decision.verdict is Verdict.QUEUED:
                assert may_wait
                assert len(running) >= limits.max_running or overtakes
                waiting[request.key] = (priority, min(deadline_ms or now_ms + 500.0, now_ms + 500.0))
            else:
                assert limits.min_retry_after_ms <= decision.retry_after_ms <= limits.max_retry_after_ms
        elif act < 0.65 and running:
            key = rng.choice(sorted(running))
            shown.add(key)
            controller.first_token(key, now_ms)
        elif act < 0.9 and (running or waiting):
            key = rng.choice(sorted(running | waiting.keys()))
            controller.end(key, now_ms, output_tokens=rng.randint(0, 20))
            running.discard(key)
            waiting.pop(key, None)
            poll()
        else:
            poll()
        assert controller.running == len(running) <= with_reserve(limits.max_running)
        assert controller.waiting == len(waiting)
        if waiting and act >= 0.65:
            assert len(running) >= limits.max_running  # no request waits while a place is free
    return decisions


@given(st.integers(0, 2**32), st.integers(1, 150))
def test_any_history_is_bounded_ordered_and_repeatable(seed: int, steps: int) -> None:
    assert _drive(seed, steps) == _drive(seed, steps)


@settings(max_examples=examples(12), deadline=None)
@given(st.integers(0, 2**32))
def test_no_class_starves_under_overload_of_the_highest(seed: int) -> None:
    rng, wait_ms = random.Random(seed), dict.fromkeys(Priority, 1e9)
    controller = AdmissionController(_limits(max_wait_ms=wait_ms, max_waiting=dict.fromkeys(Priority, 1e9)))
    running: list[str] = []
    start_ms = 1000.0
    for index in range(4):
        controller.offer(_request(f"first{index}"), UNKNOWN, start_ms)
        controller.first_token(f"first{index}", start_ms)
        running.append(f"first{index}")
    lower = {f"low{index}": (Priority.BULK, Priority.DEFAULT)[index % 2] for index in range(5)}
    for key, priority in lower.items():
        controller.offer(_request(key, priority), UNKNOWN, start_ms)
    left, now_ms, ends, order = set(lower), start_ms, 0, [""]
    while left:
        now_ms += rng.uniform(5, 15)
        for more in range(2):
            controller.offer(_request(f"high{ends}.{more}", Priority.INTERACTIVE), UNKNOWN, now_ms)
        controller.end(running.pop(0), now_ms, output_tokens=5)
        ends += 1
        for key in controller.poll(UNKNOWN, now_ms).admitted:
            controller.first_token(key, now_ms)
            running.append(key)
            left.discard(key)
            if key in lower:
                assert now_ms - start_ms >= _limits().promote_ms[lower[key]]
                assert order[-1] not in lower, "one of the highest class is served in between"
            order.append(key)
        # At 200 ms all five are overdue; from then on every second place is theirs.
        assert now_ms - start_ms < 200 + 15 * 2 * (len(lower) + 1)


def test_a_higher_class_preempts_the_newest_request_of_the_lowest_without_output() -> None:
    controller = AdmissionController(_limits())
    for index, priority in enumerate((Priority.BULK, Priority.BULK, Priority.BULK, Priority.DEFAULT)):
        controller.offer(_request(f"k{index}", priority), UNKNOWN, float(index))
    controller.first_token("k2", 5.0)
    decision = controller.offer(_request("urgent", Priority.INTERACTIVE), UNKNOWN, 6.0)
    assert decision.verdict is Verdict.ADMITTED
    assert decision.preempted == ("k1",)
    assert (controller.running, controller.waiting) == (4, 1)
    # A preempted request is admitted when a place is free, and is preempted at most twice.
    controller.end("k2", 7.0)
    assert controller.poll(UNKNOWN, 7.0).admitted == ("k1",)
    assert controller.offer(_request("urgent2", Priority.INTERACTIVE), UNKNOWN, 8.0).preempted == ("k1",)
    controller.end("k0", 9.0)
    assert controller.poll(UNKNOWN, 9.0).admitted == ("k1",)
    assert controller.offer(_request("urgent3", Priority.INTERACTIVE), UNKNOWN, 10.0).preempted == ("k3",)


def test_a_full_queue_evicts_a_request_of_the_tenant_that_fills_it() -> None:
    controller = AdmissionController(_limits())
    for index in range(4):
        controller.offer(_request(f"r{index}"), UNKNOWN, 0.0)
    controller.offer(_request("other", tenant="other"), UNKNOWN, 0.0)  # takes the reserve
    for index in range(6):
        assert (
            controller.offer(_request(f"greedy{index}", tenant="greedy"), UNKNOWN, 0.0).verdict
            is Verdict.QUEUED
        )
    assert controller.offer(_request("more", tenant="greedy"), UNKNOWN, 0.0).verdict is Verdict.REFUSED
    decision = controller.offer(_request("modest", tenant="modest"), UNKNOWN, 0.0)
    assert decision.verdict is Verdict.QUEUED
    assert decision.pushed_out == "greedy5"
    assert controller.waiting == 6
    # Until both have as many.
    offers = [controller.offer(_request(f"m{index}", tenant="modest"), UNKNOWN, 0.0) for index in range(3)]
    assert [offer.pushed_out for offer in offers] == ["greedy4", "greedy3", ""]
    assert offers[-1].verdict is Verdict.REFUSED
    controller.end("m2", 0.0)  # a key that is in no queue
    assert controller.waiting == 6


def test_a_tenant_pays_for_what_its_requests_used_beyond_their_cost() -> None:
    controller = AdmissionController(_limits(max_running=1))
    controller.offer(_request("a0", tenant="a"), UNKNOWN, 0.0)
    controller.first_token("a0", 0.0)
    for tenant in "ab":
        for index in (1, 2):
            controller.offer(_request(f"{tenant}{index}", tenant=tenant), UNKNOWN, 0.0)
    controller.end("a0", 1.0, output_tokens=100_000)
    (began,) = controller.poll(UNKNOWN, 1.0).admitted
    assert began == "b1"


def test_a_request_that_cannot_start_before_its_deadline_is_rejected_at_once() -> None:
    controller = AdmissionController(_limits(max_waiting=dict.fromkeys(Priority, 100)))
    for index in range(4):
        controller.offer(_request(f"r{index}"), UNKNOWN, 0.0)
    for index in range(40):
        controller.offer(_request(f"w{index}"), UNKNOWN, 0.0)
    now_ms, running = 0.0, [f"r{index}" for index in range(4)]
    for _ in range(20):
        now_ms += 20.0
        controller.end(running.pop(0), now_ms)
        running += controller.poll(UNKNOWN, now_ms).admitted
    # 20 requests wait and one ends every 20 ms: 420 ms.
    late = controller.offer(_request("late", deadline_ms=now_ms + 300), UNKNOWN, now_ms)
    assert late.verdict is Verdict.REFUSED
    assert 300 <= late.retry_after_ms <= 600
    assert controller.offer(_request("patient"), UNKNOWN, now_ms).verdict is Verdict.QUEUED


def test_decode_capacity_is_forecast_for_the_end_of_the_prefill() -> None:
    """Decode may be full now and free at the end of the prefill, or the other way round."""
    capacity = Capacity(prefill_tokens_per_ms=1.0, decode_sequences=1)
    controller = AdmissionController(_limits())
    soon = AdmissionRequest("soon", "t", prefill_tokens=1990, may_wait=False)
    late = AdmissionRequest("late", "t", prefill_tokens=2010, may_wait=False)
    controller.offer(AdmissionRequest("a", "t", prefill_tokens=100), capacity, 0.0)
    controller.first_token("a", 100.0)
    # The duration of a decode is not known yet, so the forecast expects none to end.
    assert controller.offer(late, capacity, 100.0).verdict is Verdict.REFUSED
    controller.end("a", 2100.0, output_tokens=100)
    controller.offer(AdmissionRequest("b", "t", prefill_tokens=100), capacity, 3000.0)
    controller.first_token("b", 3100.0)
    # A decode lasts 2000 ms: it still runs after 1990 ms and has ended after 2010 ms.
    assert controller.offer(soon, capacity, 3100.0).verdict is Verdict.REFUSED
    assert controller.offer(late, capacity, 3100.0).verdict is Verdict.ADMITTED
    naive = AdmissionController(_limits(), naive_forecast=True)
    naive.offer(AdmissionRequest("a", "t", prefill_tokens=100), capacity, 0.0)
    # No sequence decodes yet: the naive forecast admits every request.
    assert naive.offer(soon, capacity, 1.0).verdict is Verdict.ADMITTED


def test_kv_capacity_is_counted_and_unknown_capacity_refuses_nothing() -> None:
    capacity = Capacity(decode_tokens=3000)
    controller = AdmissionController(_limits())
    requests = [AdmissionRequest(f"k{i}", "t", context_tokens=1000, may_wait=False) for i in range(3)]
    verdicts = [controller.offer(request, capacity, 0.0).verdict for request in requests]
    assert verdicts == [Verdict.ADMITTED, Verdict.ADMITTED, Verdict.REFUSED]
    assert controller.offer(requests[2], UNKNOWN, 0.0).verdict is Verdict.ADMITTED


def _fill(controller: AdmissionController, tenant: str, n: int) -> list[Verdict]:
    """The verdicts on so many requests of a tenant that give tokens at once and do not end."""
    verdicts = []
    for index in range(n):
        verdicts.append(controller.offer(_request(f"{tenant}{index}", tenant=tenant), UNKNOWN, 0.0).verdict)
        controller.first_token(f"{tenant}{index}", 0.0)
    return verdicts


def test_one_tenant_takes_all_places_and_keeps_no_other_one_waiting() -> None:
    controller = AdmissionController(_limits(max_running=8))
    assert _fill(controller, "heavy", 12) == [Verdict.ADMITTED] * 8 + [Verdict.QUEUED] * 4
    assert _fill(controller, "light", 3) == [Verdict.ADMITTED] * 2 + [Verdict.QUEUED]
    controller.end("heavy0", 1.0)
    assert controller.poll(UNKNOWN, 1.0).admitted == ("light2",)
    controller.end("heavy1", 2.0)
    assert controller.poll(UNKNOWN, 2.0) == QueueChanges()  # the places beyond go first


def test_the_reserve_overtakes_no_higher_class_and_serves_no_jobs() -> None:
    controller = AdmissionController(_limits(max_running=8))
    _fill(controller, "heavy", 8)
    job = _request("job", Priority.JOB, tenant="light")
    assert controller.offer(job, UNKNOWN, 0.0).verdict is Verdict.QUEUED
    urgent = _request("urgent", Priority.INTERACTIVE, tenant="heavy")
    assert controller.offer(urgent, UNKNOWN, 0.0).verdict is Verdict.QUEUED
    assert controller.waits(_request("light", tenant="light"), UNKNOWN, 0.0)


def test_the_reserve_holds_where_prefill_is_far_behind() -> None:
    slow = Capacity(prefill_tokens_per_ms=1e-3, decode_sequences=8)
    controller = AdmissionController(_limits(max_running=100))
    for index in range(12):
        controller.offer(_request(f"heavy{index}", tenant="heavy"), slow, 0.0)
    assert 0 < controller.running < 12
    assert controller.offer(_request("light", tenant="light"), slow, 0.0).verdict is Verdict.ADMITTED


@given(st.integers(0, 2**32), st.integers(2, 40))
def test_no_tenant_below_its_share_waits_while_the_reserve_has_places(seed: int, max_running: int) -> None:
    """And what runs beyond the places of all is at most the reserve, with any number of tenants."""
    rng = random.Random(seed)
    wait_ms, n_waiting = dict.fromkeys(Priority, 1e9), dict.fromkeys(Priority, 1e9)
    controller = AdmissionController(
        _limits(max_running=max_running, max_wait_ms=wait_ms, max_waiting=n_waiting)
    )
    running: dict[str, str] = {}
    waiting: dict[str, str] = {}

    def is_below_share(tenant: str) -> bool:
        n_tenants = len({tenant, *running.values(), *waiting.values()})
        n_mine = list(running.values()).count(tenant)
        return n_tenants > 1 and (n_mine + 1) * n_tenants <= max_running

    for step in range(150):
        tenant = rng.choice("aaaaaabcd")
        decision = controller.offer(_request(f"k{step}", tenant=tenant), UNKNOWN, float(step))
        if decision.verdict is Verdict.ADMITTED:
            running[f"k{step}"] = tenant
        elif decision.verdict is Verdict.QUEUED:
            waiting[f"k{step}"] = tenant
        for of_state, share in ((running, 0.5), (waiting, 0.1)):
            if of_state and rng.random() < share:
                key = rng.choice(sorted(of_state))
                del of_state[key]
                controller.end(key, float(step))
        for key in controller.poll(UNKNOWN, float(step)).admitted:
            running[key] = waiting.pop(key)
        assert len(running) <= with_reserve(max_running)
        if len(running) < with_reserve(max_running):
            assert not any(map(is_below_share, waiting.values()))


def test_a_share_is_one_of_the_places_of_decode_where_these_are_fewer() -> None:
    eight = Capacity(decode_sequences=8)
    controller = AdmissionController(_limits(max_running=100))
    for tenant in ("heavy", "heavy", "heavy", "heavy", "a", "b", "c", "d"):
        ask = _request(f"{tenant}{controller.running}", tenant=tenant)
        assert controller.offer(ask, eight, 0.0).verdict is Verdict.ADMITTED
    # Each of five tenants has one of eight places by right.
    assert controller.offer(_request("more", tenant="a"), eight, 0.0).verdict is Verdict.QUEUED
    assert controller.above(Priority.DEFAULT) == (0, 0)
    assert controller.above(Priority.JOB) == (8, 1)
    assert controller.above(Priority.INTERACTIVE) == (0, 0)


# ---- what more workers would let run


def _queue_behind(capacity: Capacity, n: int, **limits: Any) -> AdmissionController:
    """A controller after so many requests at once met an idle fleet."""
    controller = AdmissionController(_limits(max_waiting=dict.fromkeys(Priority, 100), **limits))
    for number in range(n):
        controller.offer(_request(f"k{number}"), capacity, 0.0)
    return controller


@given(n=st.integers(0, 40), places=st.integers(1, 20), max_running=st.integers(1, 20))
def test_requests_want_places_of_decode_as_far_as_the_router_may_run_them(
    n: int, places: int, max_running: int
) -> None:
    capacity = Capacity(decode_sequences=places)
    controller = _queue_behind(capacity, n, max_running=max_running)
    wanted, room = controller.wanted(capacity, 0.0), max_running - controller.running
    if room <= 0:
        assert wanted == WantedWorkers(), "a queue behind the router's own limit wants no worker"
    else:
        assert wanted.decode_requests == min(controller.waiting, room)
        assert wanted.prefill_tokens == 10 * controller.waiting
    if max_running > with_reserve(places) and n > with_reserve(places):
        assert wanted.decode_requests > 0, "decode is what is full"


def test_what_waits_for_prefill_workers_wants_none_of_decode() -> None:
    slow = Capacity(prefill_tokens_per_ms=0.001, decode_sequences=100)
    controller = _queue_behind(slow, 5, max_prefill_wait_ms=100.0, max_running=64)
    assert controller.waiting == 4
    assert controller.wanted(slow, 0.0) == WantedWorkers(40, 0)

"""The decisions about jobs, for any input."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby

from hypothesis import example, given
from hypothesis import strategies as st

from services.router.jobs.decisions import (
    FIRST_RETRY_S,
    JOB_SHARE,
    LONGEST_HOLD_S,
    LONGEST_RETRY_S,
    MAX_FAILURES,
    Headroom,
    after_attempt,
    after_loss,
    in_claim_order,
    jobs_allowed,
    jobs_on_workers,
    jobs_to_release,
    prefix_key,
    retry_delay_s,
    share_claims,
)
from services.router.jobs.types import JobOutcome, JobState

SHARES = st.floats(0, 1)
COUNTS = st.integers(0, 300)
ROOMS = st.builds(
    Headroom,
    st.booleans(),
    COUNTS,
    COUNTS,
    COUNTS,
    COUNTS,
    st.floats(0, 60),
    COUNTS,
    st.floats(0.05, 5),
    st.booleans(),
    st.integers(0, 2),
)
OUTCOMES = st.builds(
    JobOutcome,
    st.integers(200, 599),
    st.just(b"{}"),
    st.booleans(),
    st.just(0),
    st.floats(0, 1e6),
)


@given(OUTCOMES, st.integers(0, 10), SHARES)
def test_an_attempt_ends_the_job_or_leaves_a_bounded_number_of_failures(
    outcome: JobOutcome, failures: int, jitter: float
) -> None:
    then = after_attempt(outcome, attempt=failures + 1, failures=failures, jitter=jitter)
    assert (then.state is JobState.SUCCEEDED) == (200 <= outcome.status < 300)
    if outcome.is_final:
        assert then.state.ended
    if then.state is JobState.QUEUED:
        assert FIRST_RETRY_S / 2 <= then.delay_s <= LONGEST_RETRY_S
        assert not then.is_failure or failures + 1 < MAX_FAILURES
    if outcome.status in (429, 503) and not outcome.is_final:
        assert then.state is JobState.QUEUED and not then.is_failure


@given(st.integers(0, 10), SHARES)
def test_losses_end_a_job_at_last(failures: int, jitter: float) -> None:
    then = after_loss(failures, jitter)
    assert then.is_failure
    assert (then.state is JobState.FAILED) == (failures + 1 >= MAX_FAILURES)


@given(st.integers(0, 100), SHARES)
def test_pauses_grow_and_are_bounded(failures: int, jitter: float) -> None:
    pause_s = retry_delay_s(failures, jitter)
    assert FIRST_RETRY_S / 2 <= pause_s <= LONGEST_RETRY_S
    assert retry_delay_s(failures + 1, jitter) >= pause_s


@given(
    st.dictionaries(st.text("abc", min_size=1, max_size=2), st.floats(0, 9), max_size=6),
    st.dictionaries(st.text("abc", min_size=1, max_size=2), st.integers(0, 20)),
    st.integers(0, 64),
)
def test_claims_go_to_the_tenants_with_the_fewest_running(
    waiting: dict[str, float], running: dict[str, int], n: int
) -> None:
    shares = share_claims(waiting, running, n)
    assert sum(shares.values()) == (n if waiting else 0)
    after = {tenant: running.get(tenant, 0) + shares.get(tenant, 0) for tenant in waiting}
    for tenant in shares:  # none that got a job has more than one above any that waits
        assert after[tenant] <= min(after.values()) + 1


@given(ROOMS, COUNTS, COUNTS)
def test_jobs_leave_room_to_live_requests(room: Headroom, running: int, max_running: int) -> None:
    n = jobs_on_workers(room, running=running, max_running=max_running)
    assert 0 <= n <= max_running
    if n <= room.overdue and not room.is_draining:  # these wait for no room
        return
    assert n <= running + room.idle_prefills
    if room.live_waiting or room.is_draining:
        assert n == 0
    if not room.is_ready:
        assert n <= running
    if n and room.places:
        assert room.live_running + n <= JOB_SHARE * room.places
    if room.live_running or room.live_ended_s < room.quiet_s:
        assert n <= room.beside_live


@given(ROOMS, COUNTS, COUNTS, st.floats(0, 100))
def test_only_jobs_that_were_held_for_long_go_back(
    room: Headroom, claimed: int, held: int, held_s: float
) -> None:
    calm = replace(room, is_draining=False)
    n = jobs_to_release(calm, claimed=claimed, held=held, held_s=held_s)
    assert n == (held if held_s >= LONGEST_HOLD_S else 0)


def test_an_idle_cluster_runs_a_job() -> None:
    assert jobs_on_workers(Headroom(True, 0, 0, 0, 4), running=0, max_running=64) == 4
    assert jobs_on_workers(Headroom(True, 0, 0, 8, 9), running=0, max_running=64) == 6


def _chat(system: str, user: str) -> bytes:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return json.dumps({"model": "m", "messages": messages}).encode()


def test_bodies_with_one_beginning_have_one_key() -> None:
    assert prefix_key("/a", _chat("s", "x")) == prefix_key("/a", _chat("s", "y"))
    assert prefix_key("/a", _chat("s", "x")) != prefix_key("/a", _chat("t", "x"))
    assert prefix_key("/a", _chat("s", "x")) != prefix_key("/b", _chat("s", "x"))
    assert prefix_key("/a", b'{"prompt": "x"}') != prefix_key("/a", b'{"prompt": "y"}')
    spaced = _chat("s", "x").replace(b":", b" : ")
    assert prefix_key("/a", spaced) == prefix_key("/a", _chat("s", "x"))


@given(st.binary(max_size=200))
@example(b'{"prompt": "\xff"}')
@example(b'{"pro\xffmpt": "a"}')
def test_any_body_has_a_key(body: bytes) -> None:
    assert prefix_key("/a", body) == prefix_key("/a", body)


@given(ROOMS, COUNTS)
def test_a_draining_router_gives_all_its_jobs_back(room: Headroom, running: int) -> None:
    drained = replace(room, is_draining=True)
    assert jobs_to_release(drained, claimed=running, held=0, held_s=0.0) == running


OLDEST = st.tuples(st.integers(0, 40).map(str), st.sampled_from("abc"))


@given(
    st.lists(OLDEST, min_size=1, unique_by=lambda row: row[0]),
    st.lists(st.integers(41, 60).map(str), unique=True),
)
def test_claims_are_of_one_prefix_after_the_other(oldest: list[tuple[str, str]], more: list[str]) -> None:
    first = oldest[0][1]
    prefixes = dict(oldest) | dict.fromkeys(more, first)
    alike = sorted(job_id for job_id, prefix in prefixes.items() if prefix == first)
    order = in_claim_order(oldest, alike)
    assert sorted(order) == sorted(prefixes)
    assert order[0] == oldest[0][0]
    runs = [prefix for prefix, _ in groupby(order, key=lambda job_id: prefixes[job_id])]
    assert len(runs) == len(set(runs))


def test_jobs_that_wait_for_live_requests_want_no_workers() -> None:
    idle = Headroom(False, 0, 0, 0, 0)  # not ready: there may be no worker at all
    assert jobs_allowed(idle, max_running=64) == 64
    for busy in (replace(idle, live_running=1), replace(idle, live_ended_s=1.0)):
        assert jobs_allowed(busy, max_running=64) == 0
        assert jobs_allowed(replace(busy, beside_live=4), max_running=64) == 4
    assert jobs_allowed(replace(idle, live_waiting=1, beside_live=4), max_running=64) == 0
    assert jobs_allowed(replace(idle, is_draining=True), max_running=64) == 0

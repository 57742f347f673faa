"""RetryPolicy, AwakeClock and DrainLimiter."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.fleet_bounds import MAX_UNREAD_HANDOFFS
from libs.common.service_bounds import MAX_FRUITLESS_ATTEMPTS
from services.router.execution.policies.drain_limiter import DrainLimiter
from services.router.execution.policies.retry_policy import RetryPolicy
from services.router.workers.awake_clock import LONGEST_ITERATION_S, AwakeClock
from slipstream import errors

GONE = errors.Unavailable("gone")


def test_consecutive_attempts_without_a_token_are_bounded() -> None:
    policy = RetryPolicy()
    for _ in range(10):
        for _ in range(MAX_FRUITLESS_ATTEMPTS - 1):
            policy.failed(GONE, "w", new_tokens=0)
        policy.failed(GONE, "w", new_tokens=1)
    for _ in range(MAX_FRUITLESS_ATTEMPTS - 1):
        policy.failed(GONE, "w", new_tokens=0)
    with pytest.raises(errors.Unavailable):
        policy.failed(GONE, "w", new_tokens=0)


def test_both_workers_of_a_failed_transfer_are_avoided_even_after_a_token() -> None:
    """Prefill emits a token before its KV is read: such progress must not lead back to the same pair."""
    policy = RetryPolicy()
    policy.failed(GONE, "decode", "prefill", new_tokens=1)
    assert policy.avoid == {"decode", "prefill"}
    policy.failed(GONE, "decode", "prefill2", new_tokens=1)
    assert policy.avoid == {"decode", "prefill", "prefill2"}
    policy.failed(GONE, "decode2", new_tokens=1)
    assert policy.avoid == {"decode2"}


def test_handoffs_that_no_worker_reads_are_counted_in_a_row() -> None:
    policy = RetryPolicy()
    for worker in range(MAX_UNREAD_HANDOFFS - 1):
        policy.failed(GONE, f"decode{worker}", f"prefill{worker}", new_tokens=1)
    assert not policy.reads_no_handoff
    policy.failed(GONE, "decode", new_tokens=1)
    for worker in range(MAX_UNREAD_HANDOFFS):
        assert not policy.reads_no_handoff
        policy.failed(GONE, f"decode{worker}", f"prefill{worker}", new_tokens=1)
    assert policy.reads_no_handoff


@pytest.mark.parametrize("refusal", [errors.Overloaded("no room"), errors.Draining("restarts")])
def test_workers_that_refuse_say_nothing_of_a_handoff(refusal: errors.SlipstreamError) -> None:
    """Else a busy tier would fail, or compute prompts, after a few of its workers were tried."""
    policy = RetryPolicy()
    for worker in range(MAX_UNREAD_HANDOFFS):
        policy.failed(refusal, f"decode{worker}", f"prefill{worker}", new_tokens=0)
    assert not policy.reads_no_handoff
    for worker in range(MAX_UNREAD_HANDOFFS):
        policy.failed(GONE, f"decode{worker}", f"prefill{worker}", new_tokens=1)
    policy.failed(refusal, "decode", "prefill", new_tokens=1)
    assert policy.reads_no_handoff


def test_drains_count_only_against_the_maximum_of_attempts() -> None:
    policy = RetryPolicy(max_attempts=50)
    for _ in range(49):
        policy.failed(errors.Draining("restarts"), "w", new_tokens=0)
    with pytest.raises(errors.Draining):
        policy.failed(errors.Draining("restarts"), "w", new_tokens=0)


@pytest.mark.parametrize(
    "error",
    [errors.InvalidArgument("x", "is wrong"), errors.Quarantined("no"), errors.DeadlineExceeded("late")],
)
def test_an_error_that_every_worker_would_give_ends_the_request(error: errors.SlipstreamError) -> None:
    with pytest.raises(type(error)):
        RetryPolicy().failed(error, "w", new_tokens=5)


def test_failed_workers_are_avoided_until_a_token_arrives() -> None:
    policy = RetryPolicy()
    policy.failed(GONE, "a", new_tokens=0)
    policy.failed(GONE, "b", new_tokens=0)
    assert policy.avoid == {"a", "b"}
    policy.failed(GONE, "c", new_tokens=4)
    assert policy.avoid == {"c"}


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=50))
def test_the_awake_clock_never_goes_back_and_never_jumps(iterations: list[tuple[float, bool]]) -> None:
    now_s = 0.0
    clock = AwakeClock(lambda: now_s)
    last_s = clock.now_s()
    for elapsed_s, ticks in iterations:
        now_s += elapsed_s
        assert last_s <= clock.now_s() <= last_s + min(elapsed_s, LONGEST_ITERATION_S) + 1e-9
        last_s = clock.now_s()
        if ticks:
            clock.tick()
            assert clock.now_s() == last_s


def test_the_awake_clock_follows_a_running_loop() -> None:
    now_s = 5.0
    clock = AwakeClock(lambda: now_s)
    for _ in range(100):
        now_s += 0.1
        clock.tick()
    assert clock.now_s() == pytest.approx(10.0)


def test_the_awake_clock_stands_still_while_the_clock_below_it_goes_back() -> None:
    now_s = 5.0
    clock = AwakeClock(lambda: now_s)
    now_s = 3.0
    assert clock.now_s() == 0.0
    clock.tick()
    now_s += 0.25
    assert clock.now_s() == 0.25


async def test_the_awake_clock_ticks_by_itself_until_it_is_cancelled() -> None:
    now_s, until_s = 5.0, time.monotonic() + 30.0
    clock = AwakeClock(lambda: now_s)
    running = asyncio.create_task(clock.run())
    for n_ticks in range(1, 4):
        now_s += LONGEST_ITERATION_S
        while True:  # without a tick it never exceeds LONGEST_ITERATION_S
            await asyncio.sleep(0.01)
            assert time.monotonic() < until_s
            now_s += 0.001
            if clock.now_s() > n_ticks * LONGEST_ITERATION_S:
                break
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@given(st.lists(st.sampled_from(["take a", "take b", "give a", "give b"])))
def test_moves_are_bounded_per_worker(actions: list[str]) -> None:
    limiter = DrainLimiter(max_moves=2)
    held = {"a": 0, "b": 0}
    for action in actions:
        verb, worker = action.split()
        if verb == "take":
            assert limiter.acquire(worker) == (held[worker] < 2)
            held[worker] = min(held[worker] + 1, 2)
        elif held[worker]:
            limiter.release(worker)
            held[worker] -= 1
    assert limiter.moving == sum(held.values())
    assert limiter._moving == {worker: n_held for worker, n_held in held.items() if n_held}

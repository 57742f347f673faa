"""How long a request goes on; silence; moves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.service_bounds import MAX_FRUITLESS_ATTEMPTS
from services.router.execution.policies.drain_limiter import DrainLimiter
from services.router.execution.policies.retry_policy import RetryPolicy
from services.router.workers.awake_clock import LONGEST_ITERATION_S, AwakeClock
from slipstream import errors

GONE = errors.Unavailable("gone")


def test_attempts_without_a_token_are_counted_in_a_row() -> None:
    endurance = RetryPolicy()
    for _ in range(10):
        for _ in range(MAX_FRUITLESS_ATTEMPTS - 1):
            endurance.failed(GONE, "w", new_tokens=0)
        endurance.failed(GONE, "w", new_tokens=1)
    for _ in range(MAX_FRUITLESS_ATTEMPTS - 1):
        endurance.failed(GONE, "w", new_tokens=0)
    with pytest.raises(errors.Unavailable):
        endurance.failed(GONE, "w", new_tokens=0)


def test_both_ends_of_a_broken_way_are_avoided_also_after_a_token() -> None:
    """Prefill gives one before its KV is pulled: that progress must not lead back to the same pair."""
    endurance = RetryPolicy()
    endurance.failed(GONE, "decode", "prefill", new_tokens=1)
    assert endurance.avoid == {"decode", "prefill"}
    endurance.failed(GONE, "decode2", new_tokens=1)
    assert endurance.avoid == {"decode2"}


def test_drains_are_no_failures_but_not_without_end() -> None:
    endurance = RetryPolicy(max_attempts=50)
    for _ in range(49):
        endurance.failed(errors.Draining("restarts"), "w", new_tokens=0)
    with pytest.raises(errors.Draining):
        endurance.failed(errors.Draining("restarts"), "w", new_tokens=0)


@pytest.mark.parametrize(
    "error",
    [errors.InvalidArgument("x", "is wrong"), errors.Quarantined("no"), errors.DeadlineExceeded("late")],
)
def test_what_no_other_worker_does_better_ends_at_once(error: errors.SlipstreamError) -> None:
    with pytest.raises(type(error)):
        RetryPolicy().failed(error, "w", new_tokens=5)


def test_workers_that_failed_are_avoided_until_there_is_progress() -> None:
    endurance = RetryPolicy()
    endurance.failed(GONE, "a", new_tokens=0)
    endurance.failed(GONE, "b", new_tokens=0)
    assert endurance.avoid == {"a", "b"}
    endurance.failed(GONE, "c", new_tokens=4)
    assert endurance.avoid == {"c"}


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=50))
def test_the_awake_clock_never_falls_and_never_jumps(turns: list[tuple[float, bool]]) -> None:
    now_s = 0.0
    clock = AwakeClock(lambda: now_s)
    last_s = clock.now_s()
    for elapsed_s, ticks in turns:
        now_s += elapsed_s
        assert last_s <= clock.now_s() <= last_s + min(elapsed_s, LONGEST_ITERATION_S) + 1e-9
        last_s = clock.now_s()
        if ticks:
            clock.tick()
            assert clock.now_s() == last_s


def test_the_awake_clock_follows_a_loop_that_turns() -> None:
    now_s = 5.0
    clock = AwakeClock(lambda: now_s)
    for _ in range(100):
        now_s += 0.1
        clock.tick()
    assert clock.now_s() == pytest.approx(10.0)


@given(st.lists(st.sampled_from(["take a", "take b", "give a", "give b"])))
def test_moves_are_bounded_by_worker(actions: list[str]) -> None:
    moves = DrainLimiter(max_moves=2)
    held = {"a": 0, "b": 0}
    for action in actions:
        verb, worker = action.split()
        if verb == "take":
            assert moves.acquire(worker) == (held[worker] < 2)
            held[worker] = min(held[worker] + 1, 2)
        elif held[worker]:
            moves.release(worker)
            held[worker] -= 1
    assert moves.moving == sum(held.values())

"""Seldom writes wait for nothing; many are as many as their time allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libs.common.rpc.write_limiter import BURST, QUIET_S, REST_S, WriteLimiter

_gaps = st.lists(st.floats(0.0, 4 * REST_S), max_size=200)


def _writes(gaps: list[float]) -> list[tuple[float, float]]:
    """When each was wanted, and when it was made: each as early as it may, one after the other."""
    rest, now_s, wanted_s = WriteLimiter(), 0.0, 0.0
    made = []
    for gap_s in gaps:
        wanted_s += gap_s
        now_s = max(now_s, wanted_s)
        now_s += rest.left_s(now_s)
        rest.wrote(now_s)
        made.append((wanted_s, now_s))
    return made


@given(_gaps)
def test_in_any_time_there_are_no_more_than_a_burst_and_one_each_rest(gaps: list[float]) -> None:
    made = [made_s for _, made_s in _writes(gaps)]
    for i, first_s in enumerate(made):
        for j in range(i, len(made)):
            assert j - i + 1 <= BURST + (made[j] - first_s) / REST_S + 1e-6


@given(_gaps)
def test_nobody_waits_longer_than_a_rest_who_comes_when_nobody_waits(gaps: list[float]) -> None:
    before_s = 0.0
    for wanted_s, made_s in _writes(gaps):
        assert made_s <= max(wanted_s, before_s) + REST_S + 1e-9
        before_s = made_s


@given(st.lists(st.floats(REST_S, 1.0), max_size=50))
def test_who_comes_no_more_often_than_that_waits_for_nothing(gaps: list[float]) -> None:
    for wanted_s, made_s in _writes(gaps):
        assert made_s <= wanted_s + 1e-9


def test_a_burst_goes_at_once_and_the_next_one_waits() -> None:
    rest = WriteLimiter()
    for _ in range(BURST):
        assert rest.left_s(10.0) == 0.0
        rest.wrote(10.0)
    assert 0.0 < rest.left_s(10.0) <= REST_S
    assert rest.left_s(10.0 + REST_S) < 1e-9


@given(_gaps, st.floats(0.0, 0.1))
def test_it_is_quiet_when_nothing_was_written_for_long(gaps: list[float], pause_s: float) -> None:
    rest = WriteLimiter()
    assert rest.is_quiet(1.0)
    last_s = 1.0
    for gap_s in gaps:
        last_s += gap_s + rest.left_s(last_s + gap_s)
        rest.wrote(last_s)
    if gaps and pause_s < QUIET_S + REST_S - 1e-9:
        assert not rest.is_quiet(last_s + pause_s)
    assert rest.is_quiet(last_s + BURST * REST_S + QUIET_S + pause_s + 1e-9)

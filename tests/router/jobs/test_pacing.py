"""The limits of jobs follow the latency of live requests, in simulations of a cluster."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.execution.policies.job_holds import LiveSample
from services.router.jobs.pacing import (
    LONGEST_QUIET_S,
    SHORTEST_QUIET_S,
    TRIED_SHARE,
    JobPacing,
)

MOST = 8


def _run(
    pacing: JobPacing, n: int, *, slower_beside: float, slower_after: float, seed: int = 1
) -> list[tuple[int, int]]:
    """Live requests that each meet the jobs that the limits allow; what each met, and what went on."""
    rng = random.Random(seed)
    found = []
    for index in range(n):
        beside = pacing.beside
        met = beside or int(pacing.quiet_s < 1.0 and index % 2)  # half of them come in a longer pause
        factor = slower_beside**beside if beside else slower_after**met
        noise = rng.lognormvariate(0, 0.1)
        tokens = rng.choice([60, 3000])
        pacing.observe(LiveSample(50 * (1 + tokens / 1000) * factor * noise, tokens, 10 * noise, met, beside))
        found.append((met, beside))
    return found


def test_jobs_that_slow_no_live_request_run_beside_them_and_soon_after_them() -> None:
    pacing = JobPacing(MOST)
    _run(pacing, 6000, slower_beside=1.0, slower_after=1.0)
    assert pacing.beside == MOST
    free = JobPacing(0)
    _run(free, 4000, slower_beside=1.0, slower_after=1.0)
    assert free.beside == 0
    assert free.quiet_s == pytest.approx(SHORTEST_QUIET_S)


@pytest.mark.parametrize("seed", range(5))
def test_jobs_that_slow_live_requests_meet_fewer_than_a_hundredth_of_them(seed: int) -> None:
    pacing = JobPacing(MOST)
    n = 6000
    found = _run(pacing, n, slower_beside=1.5, slower_after=1.5, seed=seed)
    for seen in range(100, n, 100):  # also the first ones
        assert sum(met > 0 for met, _ in found[:seen]) < 0.01 * seen
    assert sum(beside > 0 for _, beside in found) <= TRIED_SHARE * n


def test_the_limit_finds_the_number_of_jobs_that_a_cluster_bears() -> None:
    pacing = JobPacing(64)
    found = []
    for _ in range(6000):
        beside = pacing.beside
        factor = 1.0 if beside <= 10 else 1.3
        pacing.observe(LiveSample(50 * factor, 100, 10.0, beside, beside))
        found.append(beside)
    late = found[4000:]
    assert 4 <= sum(late) / len(late) <= 12


def test_a_cluster_that_gets_room_is_found_again() -> None:
    pacing = JobPacing(MOST)
    _run(pacing, 4000, slower_beside=2.0, slower_after=2.0)
    assert pacing.beside <= 1  # one is tried now and then
    _run(pacing, 6000, slower_beside=1.0, slower_after=1.0)
    assert pacing.beside > 1


@given(
    st.lists(
        st.builds(
            LiveSample,
            st.floats(0, 1e7),
            st.integers(-5, 1 << 20),
            st.floats(0, 1e5),
            st.integers(0, 100),
            st.integers(0, 100),
        )
    ),
    st.integers(0, 64),
)
def test_limits_keep_their_bounds_whatever_is_observed(samples: list[LiveSample], most: int) -> None:
    pacing = JobPacing(most)
    for sample in samples:
        pacing.observe(sample)
        assert 0 <= pacing.beside <= most
        assert SHORTEST_QUIET_S <= pacing.quiet_s <= LONGEST_QUIET_S

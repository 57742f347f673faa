"""Recommendations behind a simulated HPA: whatever the load is, a fleet settles at a size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bench.autoscale.hpa import PERIOD_S, HpaController
from libs.common.cluster.worker_record import Role
from services.router.autoscale.decision import STEP_SEQUENCES, recommend
from services.router.autoscale.types import AutoscalePolicy, TierLimits, WorkerLoad
from tests.router.autoscale.loads import worker

POLICY = AutoscalePolicy(limits={role: TierLimits(1, 10_000) for role in Role})


@pytest.mark.parametrize("least", [1, 3])
@given(requests=st.integers(0, 200), allowed=st.integers(1, 64))
def test_routers_become_enough_for_their_requests_and_stay(least: int, requests: int, allowed: int) -> None:
    """Requests spread evenly, behind an HPA: the routers run all of them, with little to spare."""
    n, sizes, hpa = least, [], HpaController(least, 10_000)
    for period in range(70):
        shares = [min((requests + number) // n, allowed) for number in range(n)]
        fleet = [
            worker(
                Role.ROUTER, number, requests_running=share, requests_admitted=share, requests_allowed=allowed
            )
            for number, share in enumerate(shares)
        ]
        total = recommend(fleet, Role.ROUTER, POLICY).bounded_load
        n = hpa.step(period * PERIOD_S, replicas=n, total=total)
        sizes.append(n)
    assert n * allowed >= requests
    assert sizes[-20:] == [n] * 20


@dataclass(frozen=True)
class Steps:
    """Steps of `base_ms` and `sequence_ms` for each sequence, of streams that decode workers share evenly."""

    base_ms: float
    sequence_ms: float
    streams: int

    def fleet(self, n: int) -> list[WorkerLoad]:
        """So many workers."""
        shares = [(self.streams + number) // n for number in range(n)]
        return [
            worker(Role.DECODE, number, requests_running=share, decode_step_ms=self.ms(share))
            for number, share in enumerate(shares)
        ]

    def ms(self, share: int) -> float:
        """A step of a worker with so many of them."""
        return self.base_ms + self.sequence_ms * share

    def sizes(self, n: int, *, down_window_s: float = PERIOD_S, periods: int = 150) -> list[int]:
        """What an HPA makes of a fleet of n workers, period by period."""
        sizes, hpa = [n], HpaController(1, 10_000, down_window_s=down_window_s)
        for period in range(periods):
            total = recommend(self.fleet(n), Role.DECODE, POLICY).bounded_load
            n = hpa.step(period * PERIOD_S, replicas=n, total=total)
            sizes.append(n)
        return sizes


@example(base_ms=17.0, sequence_ms=10.0, streams=20, n=3)  # 5.02 workers of 7 sequences: HPA starts 6
@given(
    base_ms=st.floats(0.1, 200.0),
    sequence_ms=st.floats(0.0, 10.0),
    streams=st.integers(1, 100),
    n=st.integers(1, 40),
)
def test_decode_settles_whatever_a_step_takes(
    base_ms: float, sequence_ms: float, streams: int, n: int
) -> None:
    steps = Steps(base_ms, sequence_ms, streams)
    sizes = steps.sizes(n)
    changes = [after - before for before, after in pairwise(sizes)]
    assert all(change >= 0 for change in changes) or all(change <= 0 for change in changes)
    assert sizes[-20:] == [sizes[-1]] * 20
    enough = math.ceil(streams / STEP_SEQUENCES)
    settled = sizes[-1]
    assert min(0.9 * settled, settled - 1) <= enough, "no more but for what HPA tolerates and rounds up"
    reports = [each.report for each in steps.fleet(sizes[-1]) if each.report is not None]
    total_ms = sum(report.decode_step_ms for report in reports if report.requests_running)
    is_fast = total_ms <= 1.1 * POLICY.aims.step_ms * sizes[-1] + 1e-6
    assert is_fast or 1.1 * sizes[-1] >= streams / STEP_SEQUENCES


@pytest.mark.parametrize(("streams", "settled"), [(40, 10), (16, 4), (3, 1)])
@pytest.mark.parametrize("n", [1, 16])
def test_a_lone_step_above_the_aim_wants_a_worker_for_four_streams(
    n: int, streams: int, settled: int
) -> None:
    """A step of 55 ms and 1 ms a sequence, under HPA's own windows."""
    sizes = Steps(55.0, 1.0, streams).sizes(n, down_window_s=300.0, periods=120)
    assert set(sizes[-60:]) == {settled}
    found = recommend(Steps(55.0, 1.0, streams).fleet(16), Role.DECODE, POLICY)
    assert "but a worker for fewer than 4 sequences is no faster), aim 50 ms" in found.reason

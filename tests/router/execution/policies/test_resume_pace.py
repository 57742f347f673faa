"""The pace of suspensions: bounded for any client, and no wait for one that takes its time."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from libs.common.service_bounds import RESUME_PAUSE_S
from services.router.execution.policies.resume_pace import ResumePace

_LIFE_S = 600.0


@given(st.lists(st.floats(0.0, 20.0), min_size=1), st.floats(0.0, 5.0))
def test_no_client_makes_a_request_go_on_often(unread_s: list[float], runs_s: float) -> None:
    """The client leaves the answer unread for these times in turn, and reads for `runs_s` between."""
    pace, now_s, n_resumed = ResumePace(), 0.0, 0
    while now_s < _LIFE_S:
        pace.suspended(now_s)
        unread = unread_s[n_resumed % len(unread_s)]
        wait_s = pace.wait_s(now_s + unread)
        assert 0 <= wait_s <= RESUME_PAUSE_S[1] + 1e-6
        assert not wait_s or unread < RESUME_PAUSE_S[1]
        now_s += unread + wait_s + runs_s
        n_resumed += 1
    doublings = math.log2(RESUME_PAUSE_S[1] / RESUME_PAUSE_S[0])
    assert n_resumed <= _LIFE_S / RESUME_PAUSE_S[1] + doublings + 2


def test_the_first_suspension_costs_a_slow_client_nothing() -> None:
    pace = ResumePace()
    assert pace.wait_s(0.0) == 0
    pace.suspended(10.0)
    assert pace.wait_s(10.1) > 0
    assert pace.wait_s(11.0) == 0
    pace.suspended(20.0)
    assert pace.wait_s(20.0) == 2 * RESUME_PAUSE_S[0]

"""Routers and the engine's scheduler order prompts by the same rule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libs.common.prefill_order import OVERDUE_SHARE, PATIENCE, goes_before, is_overdue, order_key
from libs.engine.scheduling.scheduler import Limits, StepCandidate, schedule

needs = st.integers(64, 100_000)
_STEP = 64


@given(needs, needs, st.integers(0, 2 * PATIENCE * 10**6))
def test_the_scheduler_runs_the_prompt_that_the_router_expects_first(
    theirs: int, ours: int, waited: int
) -> None:
    """An overdue prompt gets a quarter of each step."""
    prompts = [("young", 10**6, 0), ("old", 10**6, waited), ("theirs", theirs, 0), ("ours", ours, 0)]
    candidates = [
        StepCandidate(name, arrival, last_slice=0, pending_tokens=tokens, decoding=False, waited_tokens=waits)
        for arrival, (name, tokens, waits) in enumerate(prompts)
    ]
    rows = {s.seq_id: s.n_tokens for s in schedule(candidates, Limits(_STEP, 8))}
    served = "theirs" if goes_before(theirs, ours) else "ours"
    if is_overdue(waited, 10**6):
        assert rows == {"old": _STEP // OVERDUE_SHARE, served: _STEP - _STEP // OVERDUE_SHARE}
    else:
        assert rows == {served: _STEP}


@given(needs, st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_prompt_is_overdue_after_a_multiple_of_its_need(need: int, waited: int, more: int) -> None:
    assert is_overdue(PATIENCE * need, need) and not is_overdue(PATIENCE * need - 1, need)
    if is_overdue(waited, need):
        assert is_overdue(waited + more, need) and is_overdue(waited, max(need - more, 0))


@given(st.lists(needs, min_size=1))
def test_a_new_prompt_waits_for_prompts_that_need_as_much_or_less(queue: list[int]) -> None:
    ours = queue[-1]
    order = sorted(range(len(queue)), key=lambda i: order_key(queue[i], i))
    before = {i for i in order[: order.index(len(queue) - 1)]}
    assert before == {i for i, theirs in enumerate(queue[:-1]) if goes_before(theirs, ours)}

"""The order of prompts is one rule: what routers count by is what the engine's scheduler does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from libs.common.prefill_order import OLDEST_SHARE, goes_before, order_key
from libs.engine.scheduler import Candidate, Limits, schedule

needs = st.integers(64, 100_000)
_STEP = 64


@given(needs, needs)
def test_the_scheduler_serves_whom_the_router_counts_on(theirs: int, ours: int) -> None:
    prompts = [("oldest", 10**9), ("theirs", theirs), ("ours", ours)]
    candidates = [
        Candidate(name, arrival, last_turn=0, pending_tokens=tokens, decoding=False)
        for arrival, (name, tokens) in enumerate(prompts)
    ]
    rows = {s.seq_id: s.n_tokens for s in schedule(candidates, Limits(_STEP, 8))}
    served = "theirs" if goes_before(theirs, ours) else "ours"
    assert rows == {"oldest": _STEP // OLDEST_SHARE, served: _STEP - _STEP // OLDEST_SHARE}


@given(st.lists(needs, min_size=1))
def test_a_prompt_that_comes_last_waits_for_those_that_need_no_more(queue: list[int]) -> None:
    ours = queue[-1]
    order = sorted(range(len(queue)), key=lambda i: order_key(queue[i], i))
    before = {i for i in order[: order.index(len(queue) - 1)]}
    assert before == {i for i, theirs in enumerate(queue[:-1]) if goes_before(theirs, ours)}

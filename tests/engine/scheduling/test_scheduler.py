"""A step's plan keeps its budget, serves decoding sequences first and starves no sequence."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from libs.engine.scheduling.scheduler import Limits, Slice, StepCandidate, schedule


@st.composite
def candidates(draw: st.DrawFn) -> list[StepCandidate]:
    found = []
    for i in range(draw(st.integers(0, 12))):
        decoding = draw(st.booleans())
        found.append(
            StepCandidate(
                seq_id=f"s{i}",
                arrival=i,
                last_slice=draw(st.integers(0, 5)),
                pending_tokens=1 if decoding else draw(st.integers(1, 400)),
                decoding=decoding,
                n_drafts=draw(st.integers(0, 4)) if decoding else 0,
                waited_tokens=0 if decoding else draw(st.integers(0, 3000)),
            )
        )
    return found


@given(candidates(), st.integers(8, 128), st.integers(1, 8))
def test_a_plan_stays_within_its_limits(
    waiting: list[StepCandidate], step_tokens: int, max_batch: int
) -> None:
    plan = schedule(waiting, Limits(step_tokens, max_batch))
    by_id = {c.seq_id: c for c in waiting}
    assert sum(s.n_tokens + s.n_drafts for s in plan) <= step_tokens
    assert len(plan) == len({s.seq_id for s in plan}) <= max_batch
    for piece in plan:
        assert 1 <= piece.n_tokens <= by_id[piece.seq_id].pending_tokens
        assert 0 <= piece.n_drafts <= by_id[piece.seq_id].n_drafts
    n_decoding = sum(c.decoding for c in waiting)
    kept_place = n_decoding < len(waiting) and max_batch > 1
    assert sum(by_id[s.seq_id].decoding for s in plan) == min(n_decoding, max_batch - kept_place)
    assert bool(plan) == bool(waiting)


@given(candidates(), st.integers(8, 128))
def test_the_whole_budget_is_used_while_a_sequence_waits(
    waiting: list[StepCandidate], step_tokens: int
) -> None:
    plan = schedule(waiting, Limits(step_tokens, 64))
    used = sum(s.n_tokens + s.n_drafts for s in plan)
    wanted = sum(c.pending_tokens + c.n_drafts for c in waiting)
    assert used == min(step_tokens, wanted)


def test_a_short_prompt_overtakes_a_long_one() -> None:
    long = StepCandidate("long", arrival=0, last_slice=0, pending_tokens=10_000, decoding=False)
    short = StepCandidate("short", arrival=1, last_slice=0, pending_tokens=60, decoding=False)
    plan = {s.seq_id: s.n_tokens for s in schedule([long, short], Limits(128, 8))}
    assert plan == {"long": 68, "short": 60}


def test_the_oldest_overdue_prompt_gets_a_share_of_the_step() -> None:
    impatient = [
        StepCandidate(f"p{i}", i, last_slice=0, pending_tokens=100 * i, decoding=False, waited_tokens=waited)
        for i, waited in ((1, 399), (2, 801), (3, 5000))
    ]
    assert {s.seq_id: s.n_tokens for s in schedule(impatient, Limits(64, 8))} == {"p2": 16, "p1": 48}


def test_a_prefill_ends_despite_newer_prompts() -> None:
    """A prefill that waited for four times its need gets a quarter of each step."""
    old = StepCandidate("old", arrival=0, last_slice=0, pending_tokens=1000, decoding=False)
    arrival = 1
    for step in range(64):
        fresh = [
            StepCandidate(f"n{arrival + i}", arrival + i, last_slice=0, pending_tokens=50, decoding=False)
            for i in range(20)
        ]
        arrival += 20
        plan = {s.seq_id: s.n_tokens for s in schedule([old, *fresh], Limits(128, 64))}
        own = plan.get("old", 0)
        assert own == 0 if step < 32 else own >= min(old.pending_tokens, 32)
        old = replace(
            old, pending_tokens=old.pending_tokens - own, waited_tokens=old.waited_tokens + 128 - own
        )
        if not old.pending_tokens:
            return
    raise AssertionError("a prefill starved")


def test_decoding_sequences_beyond_the_batch_limit_alternate() -> None:
    waiting = [StepCandidate(f"s{i}", i, last_slice=0, pending_tokens=1, decoding=True) for i in range(5)]
    served: dict[str, int] = {}
    turn = 0
    for _ in range(10):
        for piece in schedule(waiting, Limits(8, 2)):
            turn += 1
            served[piece.seq_id] = served.get(piece.seq_id, 0) + 1
            waiting = [replace(c, last_slice=turn) if c.seq_id == piece.seq_id else c for c in waiting]
    assert served == {f"s{i}": 4 for i in range(5)}


def test_a_full_batch_leaves_a_row_for_a_prefill() -> None:
    waiting = [StepCandidate(f"d{i}", i, last_slice=0, pending_tokens=1, decoding=True) for i in range(4)]
    prefill = StepCandidate("p", 9, last_slice=0, pending_tokens=50, decoding=False)
    assert "p" in {s.seq_id for s in schedule([*waiting, prefill], Limits(16, 4))}


def test_a_long_prompt_has_longer_steps_while_it_is_alone() -> None:
    limits = Limits(64, 8, long_step_tokens=200)
    long = StepCandidate("long", 0, 0, pending_tokens=900, decoding=False, computed_tokens=8 * 64)
    assert schedule([long], limits) == [Slice("long", 200)]
    assert schedule([replace(long, computed_tokens=8 * 64 - 1)], limits) == [Slice("long", 64)]
    assert schedule([long], Limits(64, 8)) == [Slice("long", 64)]
    for other in (
        StepCandidate("d", 1, 0, pending_tokens=1, decoding=True),
        StepCandidate("p", 1, 0, pending_tokens=1000, decoding=False),
    ):
        plan = {s.seq_id: s.n_tokens for s in schedule([long, other], limits)}
        assert sum(plan.values()) == 64

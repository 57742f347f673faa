"""The gate finds the cheaper way of stepping, keeps trying the other, and judges batch sizes apart."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.decode.draft_gate import DraftGate, GateLimits

LIMITS = GateLimits()
TRIAL = 2 * (LIMITS.tried_steps + LIMITS.skipped_steps)


def run(
    gate: DraftGate, steps: int, *, with_ms: float, without_ms: float, accepted: float, sequences: int = 1
) -> list[bool]:
    """The ways taken when a step with drafts gives 1 + `accepted` tokens to each sequence on average."""
    rng = Random(1)
    taken = []
    for _ in range(steps):
        drafts = gate.open(sequences)
        taken.append(drafts)
        tokens = sequences
        if drafts:
            tokens += sum(rng.random() * 2 * accepted for _ in range(sequences)).__round__()
        elapsed_ms = with_ms if drafts else without_ms
        gate.record(sequences, drafts=drafts, elapsed_ms=elapsed_ms, n_tokens=tokens)
    return taken


def test_drafts_that_cost_more_than_they_save_are_left_out() -> None:
    taken = run(DraftGate(), 2000, with_ms=12.0, without_ms=3.0, accepted=1.8)
    assert taken[0]
    assert sum(taken) <= 5 * TRIAL
    assert not all(taken[TRIAL:])


def test_drafts_that_pay_stay() -> None:
    taken = run(DraftGate(), 2000, with_ms=30.0, without_ms=25.0, accepted=1.8)
    assert sum(taken) >= 2000 - 5 * TRIAL


def test_a_change_is_found() -> None:
    gate = DraftGate()
    run(gate, 5000, with_ms=12.0, without_ms=3.0, accepted=1.8)
    taken = run(gate, 3 * LIMITS.most_kept_steps, with_ms=12.0, without_ms=30.0, accepted=1.8)
    assert all(taken[-LIMITS.tried_steps :])


def test_batch_sizes_are_judged_apart() -> None:
    gate = DraftGate()
    run(gate, 300, with_ms=12.0, without_ms=3.0, accepted=1.0, sequences=1)
    run(gate, 300, with_ms=12.0, without_ms=11.0, accepted=1.0, sequences=8)
    assert (gate.open(1), gate.open(8)) == (False, True)


def test_steps_that_went_otherwise_are_not_counted() -> None:
    gate = DraftGate()
    for _ in range(1000):
        gate.record(1, drafts=False, elapsed_ms=0.001, n_tokens=1)
    assert gate.open(1)


@given(
    with_ms=st.floats(1, 100),
    without_ms=st.floats(1, 100),
    accepted=st.floats(0.2, 2.5),
    sequences=st.integers(1, 16),
)
def test_the_worse_way_takes_few_steps(
    with_ms: float, without_ms: float, accepted: float, sequences: int
) -> None:
    cost_with, cost_without = with_ms / (1 + accepted), without_ms
    if 0.6 < cost_with / cost_without < 1.6:
        return  # too close for a short noisy trial to tell
    taken = run(
        DraftGate(), 4000, with_ms=with_ms, without_ms=without_ms, accepted=accepted, sequences=sequences
    )
    better = cost_with < cost_without
    assert sum(way is better for way in taken) >= 0.9 * len(taken)

"""Each rule of the gate from both sides of where it begins to hold. Steps have no noise."""

from __future__ import annotations

from typing import Any

import pytest

from services.decode.draft_gate import DraftGate, DraftMode, GateLimits, _TrialPhase

LIMITS = GateLimits()
FULL, FEW = LIMITS.window_steps, LIMITS.checked_steps


def bucket_of(gate: DraftGate, n_sequences: int = 1, context: int = 500, **fields: Any) -> Any:
    """A bucket with these fields and, of `own_ms` and `trial_ms`, steps of one token in its windows."""
    bucket = gate._bucket(n_sequences, context)
    steps, own_ms = fields.pop("steps", FULL), fields.pop("own_ms", 10.0)
    trial_steps, trial_ms = fields.pop("trial_steps", 0), fields.pop("trial_ms", 0.0)
    for _ in range(steps):
        bucket.window.add(own_ms, 1.0, 0)
    for _ in range(trial_steps):
        bucket.trial.add(trial_ms, 1.0, 3)
    for name, value in fields.items():
        setattr(bucket, name, value)
    return bucket


@pytest.mark.parametrize(
    ("is_tried", "own_ms", "steps", "others"),
    [
        (True, 10.3, FULL, {}),
        (False, 10.1, FULL, {}),  # within the margin
        (True, 10.1, FULL, {"setup_ms": 0.2}),
        (False, 10.3, FULL, {"settled_steps": FULL + 1}),
        (False, 10.3, FULL, {"settled_steps": 0}),
        (False, 14.0, FEW, {}),  # the window is not full, and the verdict not clear
        (True, 16.0, FEW, {}),
        (True, 14.0, FEW, {"n_sequences": 16}),
        (False, 10.0, FULL - 1, {"other_ms": None}),
        (True, 10.0, FULL, {"other_ms": None}),
        (True, 5.0, FULL, {"settled_ms": 1e6}),  # the pause is over
    ],
)
def test_plain_steps_are_tried_where_drafts_cost_more_than_they_did(
    is_tried: bool, own_ms: float, steps: int, others: dict[str, Any]
) -> None:
    gate, n_sequences = DraftGate(), others.pop("n_sequences", 1)
    gate.record_setup(others.pop("setup_ms", 0.0), 1)
    fields = {"on": True, "due_ms": 1e6, "other_ms": 10.0, "settled_steps": FULL, **others}
    bucket_of(gate, n_sequences, own_ms=own_ms, steps=steps, **fields)
    assert gate.choose(n_sequences, 500) is (DraftMode.FEATURES if is_tried else DraftMode.ON)


def test_batches_fall_in_sizes_and_lengths() -> None:
    gate = DraftGate()
    alike = [
        [(1, 0), (1, 1023)],
        [(1, 1024), (1, 4095)],
        [(1, 4096), (1, 16_383)],
        [(2, 0), (3, 1023)],
        [(4, 0), (7, 0)],
    ]
    found = [{gate._bucket(*each).key for each in batches} for batches in alike]
    assert [len(keys) for keys in found] == [1] * 5 and len(set().union(*found)) == 5


def test_a_new_bucket_takes_the_verdict_of_the_nearest_one_and_the_pause_of_no_larger_one() -> None:
    gate = DraftGate()
    bucket_of(gate, 1, on=True, due_ms=100.0)
    bucket_of(gate, 16, on=False, due_ms=200.0)
    near = [gate._bucket(*batch) for batch in ((2, 500), (8, 500), (16, 2000), (32, 500))]
    assert [(each.on, each.due_ms) for each in near] == [(True, 0), (False, 0), (False, 200), (False, 200)]


def in_trial(excess_ms: float) -> DraftGate:
    gate = DraftGate()
    gate._trial, gate._excess_ms = _TrialPhase.DRAFTS, excess_ms
    return gate


def test_buckets_without_steps_in_a_trial_follow_the_nearest_judged_one() -> None:
    gate = in_trial(excess_ms=50.0)
    won = bucket_of(gate, 1, trial_steps=5, trial_ms=5.0)
    lost = bucket_of(gate, 64, trial_steps=5, trial_ms=20.0)
    unknown = bucket_of(gate, 2, steps=3)
    known = bucket_of(gate, 4)
    lost_before = bucket_of(gate, 1, 2000, other_ms=30.0, settled_ms=7.0, due_ms=1.0)
    smaller = bucket_of(gate, 32, steps=3, settled_ms=7.0)
    smaller_known = bucket_of(gate, 16, settled_ms=7.0)
    as_large = bucket_of(gate, 64, 2000, steps=3, due_ms=7_000.0, settled_ms=1_500.0)
    gate._end()
    assert won.on and won.other_ms == 10.0
    assert not lost.on and (lost.other_ms, lost.due_ms) == (20.0, 5_000.0)
    assert won.due_ms == 8 * (10.0 - 5.0) * LIMITS.trial_steps
    assert unknown.on and (unknown.other_ms, unknown.due_ms) == (None, won.due_ms)
    assert known.on and (known.other_ms, known.due_ms) == (10.0, won.due_ms)
    assert not lost_before.on and (lost_before.settled_ms, lost_before.due_ms) == (7.0, 1.0)
    assert not smaller.on and (smaller.settled_ms, smaller.due_ms) == (7.0, 0.0)
    assert not smaller_known.on and (smaller_known.settled_ms, smaller_known.due_ms) == (0.0, 5_000.0)
    assert not as_large.on and (as_large.settled_ms, as_large.due_ms) == (0.0, 5_500.0)


def test_a_trial_that_judges_none_pauses_those_that_it_tried() -> None:
    gate = in_trial(excess_ms=50.0)
    tried = bucket_of(gate, 1, trial_steps=LIMITS.least_steps - 1, trial_ms=1.0)
    other = bucket_of(gate, 16, steps=3)
    gate._end()
    assert not tried.on and tried.due_ms == 5_000.0 and other.due_ms == 0.0


def test_the_setup_of_contexts_counts_against_drafts() -> None:
    gate = in_trial(excess_ms=0.0)
    gate.record_setup(1.0, 1)
    bucket = bucket_of(gate, 1, trial_steps=5, trial_ms=9.5)
    gate._end()
    assert not bucket.on and bucket.other_ms == 10.5

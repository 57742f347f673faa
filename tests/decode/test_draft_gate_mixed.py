"""The gate where batches of several sizes are open and closed at once."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.decode.draft_gate import DraftGate, DraftMode
from tests.support.examples import examples

PLAIN_MS = 20.0
SIZES = (1, 2, 5, 16)


class Machine:
    """Steps of batches of these sizes. `factors`: the cost of a token with drafts, of one without."""

    def __init__(self, factors: dict[int, float], seed: int) -> None:
        self.factors, self.rng, self.gate = factors, Random(seed), DraftGate()
        self.spent_ms = dict.fromkeys(factors, 0.0)
        self.plain_ms = dict.fromkeys(factors, 0.0)  # of the same tokens without drafts

    def step(self, size: int) -> DraftMode:
        mode = self.gate.choose(size, 500)
        drafts = mode is DraftMode.ON
        tokens = 3.0 if drafts else 1.0
        cost_ms = PLAIN_MS * (self.factors[size] if drafts else 1.0) * self.rng.uniform(0.95, 1.05)
        elapsed_ms = cost_ms * tokens
        self.gate.record(
            mode,
            size,
            500,
            elapsed_ms=elapsed_ms,
            n_tokens=int(tokens * size),
            n_drafts=3 * size if drafts else 0,
        )
        self.spent_ms[size] += elapsed_ms
        self.plain_ms[size] += tokens * PLAIN_MS
        return mode

    def run(self, steps: int, sizes: tuple[int, ...] = SIZES) -> None:
        size = self.rng.choice(sizes)
        for _ in range(steps):
            if self.rng.random() < 0.2:
                size = self.rng.choice(sizes)
            self.step(size)

    def pauses_ms(self) -> dict[tuple[int, int], float]:
        return {key: bucket.due_ms - bucket.settled_ms for key, bucket in self.gate._buckets.items()}


@settings(max_examples=examples(12), deadline=None)
@given(
    st.fixed_dictionaries({size: st.sampled_from([0.4, 0.7, 1.5, 4.0]) for size in SIZES}),
    st.integers(0, 2**31),
)
def test_drafts_that_lose_in_some_sizes_cost_little_in_all(factors: dict[int, float], seed: int) -> None:
    machine = Machine(factors, seed)
    machine.run(4_000)
    spent, plain = sum(machine.spent_ms.values()), sum(machine.plain_ms.values())
    machine.run(8_000)
    for bucket in machine.gate._buckets.values():
        assert bucket.other_ms is None or math.isfinite(bucket.other_ms)
        assert bucket.due_ms <= machine.gate.limits.longest_pause_ms
    assert sum(machine.spent_ms.values()) - spent <= 1.04 * (sum(machine.plain_ms.values()) - plain)


def test_a_plain_trial_that_ends_amid_one_of_drafts_does_not_turn_drafts_on() -> None:
    machine = Machine({1: 0.4, 16: 0.4}, seed=3)
    machine.run(3_000, sizes=(1, 16))
    buckets = {bucket.n_sequences: bucket for bucket in machine.gate._buckets.values()}
    assert buckets[1].on and buckets[16].on
    buckets[1].switch()  # closed, and due: its trial of drafts runs while the other one tries plain steps
    machine.factors = {1: 0.4, 16: 4.0}
    machine.run(3_000, sizes=(1, 16))
    assert not buckets[16].on and buckets[16].other_ms is not None and math.isfinite(buckets[16].other_ms)


def test_a_cheap_trial_of_a_small_batch_does_not_end_the_pause_of_a_large_one() -> None:
    machine = Machine({1: 1.5, 16: 4.0}, seed=5)
    for _ in range(1_500):
        machine.step(16)
    large = max(machine.pauses_ms().items())[0]
    for _ in range(3_000):
        before_ms = machine.pauses_ms()[large]
        machine.step(1)
        assert machine.pauses_ms()[large] >= before_ms

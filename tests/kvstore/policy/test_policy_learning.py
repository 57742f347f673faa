"""Hit density learns from the first blocks on: few rounds of a loop suffice, and learning is seldom later."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.cache.compare import HitDensity
from services.kvstore.policy.history import History
from services.kvstore.policy.reuse import ReuseModel
from tests.support.examples import examples


@pytest.mark.parametrize(("capacity", "n_documents"), [(100, 130), (30, 40), (300, 500)])
def test_the_second_round_of_a_loop_hits_most_of_what_the_tier_holds(capacity: int, n_documents: int) -> None:
    cache = HitDensity(capacity)
    rounds = [sum(cache.serve((number,)) for number in range(n_documents)) for _ in range(5)]
    assert rounds[0] == 0
    assert rounds[1] >= 0.6 * capacity, rounds
    assert rounds[-1] == capacity, rounds


@settings(max_examples=examples(12), deadline=None)
@given(n_blocks=st.integers(1, 40), n_chains=st.integers(1, 300))
def test_values_are_never_older_than_a_part_of_what_was_seen(n_blocks: int, n_chains: int) -> None:
    """They are computed within 32 wanted blocks or 1/64 of all, and at most once a chain."""
    history = History(64, sample_rate=1)
    model = ReuseModel(history)
    learned_at, n_learned = 0, 0
    for number in range(n_chains):
        before = model.values
        model.record(history.want([bytes([number % 7, at]) for at in range(n_blocks)])[1], wanted=True)
        model.learn_if_due()
        if model.values is not before:
            learned_at, n_learned = history.now, n_learned + 1
        assert history.now - learned_at < max(32, history.now / 64)
    assert n_learned <= history.now / 32

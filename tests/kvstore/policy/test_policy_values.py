"""What blocks are worth to the policy that is followed, and what the model of hit density learns."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.kvstore.policy import history, reuse
from services.kvstore.policy.adaptive import HIT_DENSITY, POLICY_NAMES, AdaptivePolicy
from services.kvstore.policy.arc import ArcPolicy
from services.kvstore.policy.history import CHAIN_END, FIRST_WANT, N_KINDS, History, ReuseAge
from services.kvstore.policy.lru import LruPolicy
from services.kvstore.policy.reuse import N_BINS, ReuseModel, bin_of, bins_of

LRU, ARC, S3_FIFO = range(HIT_DENSITY)
EDGES = [0.0, *(2 ** (at / 2) for at in range(1, N_BINS + 1))]


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


# ---- AdaptivePolicy


def test_evicted_blocks_that_are_wanted_count_once_with_the_time_between() -> None:
    policy = AdaptivePolicy(8)
    policy.want(keys(1, 2), now_ms=100.0)
    for number in (1, 2):
        policy.publish(key(number))
    policy.evicted(key(2))
    policy.discard(key(1))  # it left for another reason
    for _ in range(2):
        policy.want(keys(1, 2), now_ms=130.0)
        assert (policy.rewanted_blocks, policy.rewanted_gap_ms) == (1, 30.0)
    policy.publish(key(2))
    policy.evicted(key(2))
    policy.want(keys(2), now_ms=130.0)
    assert (policy.rewanted_blocks, policy.rewanted_gap_ms) == (2, 30.0)


def test_what_is_known_of_a_block_is_that_of_its_record() -> None:
    policy = AdaptivePolicy(8)
    policy.want(keys(1, 2))
    assert policy.knows(key(2)) and not policy.knows(key(3))
    assert policy.location(key(1)) == (None, 0, FIRST_WANT)
    assert policy.location(key(2)) == (key(1), 1, CHAIN_END) and policy.kind(key(2)) == CHAIN_END
    assert policy.location(key(3)) is None
    with pytest.raises(KeyError):
        policy.kind(key(3))
    policy.model.reuse[CHAIN_END] = 0.25
    assert (policy.expected_reuse(key(2)), policy.expected_reuse(key(3))) == (0.25, 0.0)
    for number in (3, 4):  # unknown blocks change nothing
        policy.evicted(key(number))
        policy.discard(key(number))
        policy.spared(key(number))
    assert not policy.knows(key(3))
    policy.check()


def test_blocks_that_no_request_wanted_are_served_as_new_ones() -> None:
    policy = AdaptivePolicy(2)
    assert policy.offer(keys(1, 2, 1)) == keys(1, 2, 1)
    assert [policy.kind(key(number)) for number in (1, 2)] == [FIRST_WANT] * 2
    policy.publish(key(3))
    policy.evicted(key(3))  # before the first want
    assert policy.location(key(3)) == (None, 0, FIRST_WANT)
    policy.want(keys(3), now_ms=5.0)
    assert (policy.rewanted_blocks, policy.rewanted_gap_ms) == (1, 5.0)
    policy.check()


def test_blocks_that_are_only_stored_and_evicted_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MIN_GHOST_BLOCKS", 10)
    policy = AdaptivePolicy(2)
    for number in range(100):
        policy.publish(key(number))
        policy.evicted(key(number))
        assert len(policy.history) <= policy.history.max_blocks + 2 == 14
    policy.check()


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_arc_aims_at_no_more_recent_blocks_than_it_has_room_for(capacity: int) -> None:
    policy = AdaptivePolicy(8)
    policy.fix_policy(ARC)
    arc = policy.live
    assert isinstance(arc, ArcPolicy)
    for chain in ([*range(8)], [*range(4)], [*range(10, 18)], [*range(4, 8)], [*range(10, 14)]):
        policy.want(keys(*chain))
    assert arc._target_blocks > 3
    policy.resize(capacity)
    assert arc._target_blocks == capacity >= len(arc)
    assert len(arc._recent) + len(arc._recent_ghosts) <= capacity
    assert len(arc) + len(arc._recent_ghosts) + len(arc._frequent_ghosts) <= 2 * capacity
    policy.check()


@pytest.mark.parametrize("number", [LRU, ARC, S3_FIFO, HIT_DENSITY])
def test_blocks_are_worth_what_the_policy_that_is_followed_knows(number: int) -> None:
    policy = AdaptivePolicy(2)
    policy.fix_policy(number)
    assert policy.followed == POLICY_NAMES[number] and policy.live.name.replace("_", "") in (
        POLICY_NAMES[number].lower().replace("-", "").replace(" ", "")
    )
    kinds, ages = np.array([CHAIN_END, FIRST_WANT]), np.array([10, 20])
    if number == HIT_DENSITY:
        policy.model.values[CHAIN_END, bin_of(10)] = 7.0
        assert policy.values(kinds, ages).tolist() == [7.0, policy.model.values[FIRST_WANT, bin_of(20)]]
        return
    assert policy.values(kinds, ages).tolist() == [-10.0, -20.0]
    for chain in ([1], [2], [3, 4, 5]):  # of 1, 2 and 5, which leave, all are ends of chains
        policy.want(keys(*chain))
    lifetime = 4.0
    lifetime += (3 - lifetime) / 64
    lifetime += (0 - lifetime) / 64
    expected = [-10.0, -20.0] if number == LRU else [-10 / lifetime, -20 / lifetime]
    assert policy.values(kinds, ages) == pytest.approx(expected)
    policy._lifetimes[FIRST_WANT] = 40.0
    expected = [-10.0, -20.0] if number == LRU else [-10 / lifetime, -20 / 40]
    assert policy.values(kinds, ages) == pytest.approx(expected)
    other = [-10.0] if number == LRU else [-10 / 40]  # the longest, for a kind of which nothing has left
    assert policy.values(np.array([FIRST_WANT + 1]), np.array([10])) == pytest.approx(other)


def test_wants_that_come_again_count_as_hits_and_forgotten_blocks_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history, "MIN_GHOST_BLOCKS", 10)
    policy = AdaptivePolicy(2)
    for number in (1, 2, 1, 2, *range(10, 60)):
        policy.want(keys(number))
    assert sum(map(sum, policy.model._hits)) == pytest.approx(2, rel=1e-2)
    assert sum(map(sum, policy.model._ended)) > 30


@pytest.mark.parametrize("simulated_blocks", [2, 100])
def test_a_policy_that_is_fixed_decides_at_once_what_leaves(simulated_blocks: int) -> None:
    policy = AdaptivePolicy(8, simulated_blocks=simulated_blocks)
    for number in range(8):
        policy.want(keys(number))
        policy.publish(key(number))
    policy.fix_policy(LRU)
    assert isinstance(policy.live, LruPolicy)
    if simulated_blocks == 2:  # the cache that is followed begins empty
        assert not len(policy.live) and policy.choose_victim() == key(0)
        policy.check()
        return
    policy.want(keys(0, 1))
    named = [policy.choose_victim() for _ in range(8)]
    assert named == keys(2, 3, 4, 5, 6, 7, 1, 0)
    policy.check()


# ---- ReuseModel


def test_an_age_is_in_the_bin_whose_edges_it_lies_between() -> None:
    ages = np.array([*range(3000), 2**20 - 1, 2**20, 2**26 - 1, 2**26, 2**40])
    assert bins_of(ages).tolist() == [bin_of(age) for age in ages.tolist()]
    for age in ages.tolist():
        at = bin_of(age)
        assert EDGES[at] <= age and (age < EDGES[at + 1] or at == N_BINS - 1)


def test_waits_that_end_count_with_the_time_in_their_last_bin() -> None:
    model = ReuseModel(History(64, sample_rate=1))
    wanted, forgotten = ReuseAge(CHAIN_END, 9), ReuseAge(CHAIN_END, 11)
    wanted.n_blocks = 3
    model.record([wanted], wanted=True)
    model.record([forgotten], wanted=False)
    at = bin_of(9)
    assert at == bin_of(11) == 6  # from 8 on
    assert (model._hits[CHAIN_END][at], model._ended[CHAIN_END][at]) == (3, 4)
    assert model._partial[CHAIN_END][at] == 3 * (9 - 8) + (11 - 8)
    assert sum(map(sum, model._ended)) == 4


def test_before_anything_is_learned_values_are_in_the_order_of_lru() -> None:
    model = ReuseModel(History(64, sample_rate=1))
    ages = np.array([0, 1, 5, 90, 4000, 2**30])
    for kind in (CHAIN_END, N_KINDS - 1):
        found = [model.value(kind, age) for age in ages.tolist()]
        assert found == sorted(found, reverse=True) == model.values_of(np.full(6, kind), ages).tolist()
        assert found == [1 / EDGES[bin_of(age) + 1] for age in ages.tolist()]


def test_a_constant_rate_is_the_value_at_every_age_and_a_rising_one_counts_before_it_rises() -> None:
    rates = np.full((1, N_BINS), 1e-3)
    values, [chance] = reuse._best_density(rates)
    assert values == pytest.approx(rates)
    assert chance == pytest.approx(1 - math.exp(-1e-3 * EDGES[-1]))
    rates[0, 20:] = 1e-8
    values, _ = reuse._best_density(rates)
    assert values == pytest.approx(rates), "nothing is gained by waiting for a lower rate"
    rates[0, :20], rates[0, 20], rates[0, 21:] = 1e-6, 1e-2, 1e-8
    values, _ = reuse._best_density(rates)
    before = values[0, :21]
    assert (np.diff(before) > 0).all() and before[-1] == pytest.approx(1e-2) and before[0] > 1e-4
    assert values[0, 21:] == pytest.approx(rates[0, 21:])


def test_rates_of_kinds_that_are_seen_seldom_are_near_those_of_kinds_like_them() -> None:
    nothing = np.zeros((N_KINDS, N_BINS))
    by_age = 1 / np.array(EDGES[1:])
    assert reuse._rates(nothing, nothing) == pytest.approx(np.tile(by_age, (N_KINDS, 1)))
    hits, exposure = nothing.copy(), nothing.copy()
    hits[FIRST_WANT + 1, 10], exposure[FIRST_WANT + 1, 10] = 1e6, 1e7
    rates = reuse._rates(hits, exposure)[:, 10]
    assert rates[FIRST_WANT + 1] == pytest.approx(0.1, rel=1e-3)
    assert rates[FIRST_WANT + 2] == pytest.approx(0.1, rel=1e-3), "of the same frequency"
    exposure[CHAIN_END, 10] = 1e9
    rates = reuse._rates(hits, exposure)[:, 10]
    assert rates[CHAIN_END] == rates.min() < 1e-7 < rates[-1] < rates[FIRST_WANT + 1]


def test_what_is_learned_of_a_loop_says_when_its_blocks_come_again() -> None:
    history = History(64, sample_rate=1)
    model = ReuseModel(history)
    for _ in range(12):
        for number in range(100):
            model.record(history.want(keys(number))[1], wanted=True)
            model.learn_if_due()
    kind = history.get(key(0)).kind  # type: ignore[union-attr]
    assert model.reuse[kind] > 0.9
    assert model.value(kind, 90) > model.value(kind, 50) > model.value(kind, 10)
    assert model.value(kind, 1000) < model.value(kind, 90) / 10
    assert model.value_rows == model.values.tolist()


def test_what_was_seen_counts_half_after_the_half_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reuse, "_MIN_HALF_LIFE_BLOCKS", 100)
    history = History(50, sample_rate=1)  # half the time is four capacities
    model = ReuseModel(history)
    model.record([ReuseAge(CHAIN_END, 9)], wanted=True)
    history.now = 200
    model.learn_if_due()
    assert model._hits[CHAIN_END][6] == model._ended[CHAIN_END][6] == model._partial[CHAIN_END][6] == 0.5
    history.now = 400
    model.learn_if_due()
    assert model._hits[CHAIN_END][6] == 0.25


def test_blocks_that_still_wait_lower_the_rate_of_their_kind_while_they_are_remembered() -> None:
    history = History(64, sample_rate=1)
    model = ReuseModel(history)
    before = model.value(CHAIN_END, 100)
    for number in range(2000):
        history.want(keys(number))
    model._learn()
    assert model.value(CHAIN_END, 100) < before / 4
    history.max_blocks = 0
    history.drop_old()
    assert not len(history)
    model._learn()
    assert model.value(CHAIN_END, 100) == pytest.approx(before)

"""The weights of simulated caches, and which blocks they make worth keeping."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.policy import weights as weights_module
from services.kvstore.policy.history import BlockRecord
from services.kvstore.policy.weights import PolicyWeights
from services.kvstore.policy.worth import WorthQueues

WEIGHTS = (1.0, 2.5, 0.5)  # no two sets of these caches weigh the same
HELD = st.integers(0, (1 << len(WEIGHTS)) - 1)


def block(name: int, held: int) -> BlockRecord:
    record = BlockRecord(name.to_bytes(4, "little"), None, name, sampled=False)
    record.held = held
    return record


def worth(held: int) -> float:
    """Of a block that these caches hold; one that none holds goes before all else."""
    return sum(weight for bit, weight in enumerate(WEIGHTS) if held >> bit & 1) if held else -1.0


def queues_of(helds: list[int]) -> tuple[WorthQueues, list[BlockRecord]]:
    queues, records = WorthQueues(WEIGHTS), [block(number, held) for number, held in enumerate(helds)]
    for record in records:
        queues.enqueue(record)
    return queues, records


@given(st.lists(HELD, max_size=12), st.lists(HELD, max_size=12), st.integers(0, 4))
def test_a_block_is_kept_where_one_that_is_worth_no_more_leaves_for_it(
    helds: list[int], new: list[int], room: int
) -> None:
    queues, _ = queues_of(helds)
    records = [block(100 + number, held) for number, held in enumerate(new)]
    left, expected, free = sorted(map(worth, helds)), [], room
    for record in records:
        least = left[0] if left else max(map(worth, range(1 << len(WEIGHTS))))
        if free > 0:
            free -= 1
        elif worth(record.held) < least:
            continue
        elif left:
            left.pop(0)
        left = sorted([*left, worth(record.held)])
        expected.append(record)
    assert queues.kept(records, room) == expected


@given(st.lists(HELD, max_size=12))
def test_the_block_worth_least_is_named_first_and_a_spared_one_is_the_next(helds: list[int]) -> None:
    queues, records = queues_of(helds)
    named = list(iter(queues.next, None))
    assert [record.row for record in named] == sorted(range(len(helds)), key=lambda row: worth(helds[row]))
    assert len(queues) == len(records) and all(record.queue is not None for record in records)
    for record in records:
        queues.check(record)
    if records:
        first, second = queues.next(), queues.next()
        assert first is named[0]
        queues.spared(first)
        queues.spared(first)  # it is in its queue again: nothing changes
        assert queues.next() is first
        for record in records:
            queues.remove(record)
            queues.remove(record)
        assert not len(queues) and queues.next() is None and (second is None or second.queue is None)


def judged(weights: PolicyWeights, n_chains: int = 40) -> PolicyWeights:
    for number in range(n_chains):
        assert weights.judge([number % 3, 2, number % 2], 5_000)
    return weights


def test_sums_that_are_scaled_down_weigh_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = judged(PolicyWeights((1.0, 2.0, 1.0), 64))
    monkeypatch.setattr(weights_module, "_MAX_SCALE", 1.1)
    scaled = judged(PolicyWeights((1.0, 2.0, 1.0), 64))
    assert scaled._scale < 1.2 < whole._scale
    assert scaled.values == pytest.approx(whole.values)


def test_hits_count_half_after_the_half_life_and_a_lead_of_one_deviation_counts_e_times() -> None:
    weights, least = PolicyWeights((1.0, 1.0), 2_048), weights_module.MIN_DEVIATION_BLOCKS
    assert weights.judge([110, 10], 0)
    assert weights.values == pytest.approx([1.0, math.exp(-100 / (100 + least))])
    assert weights.judge([0, 50], weights_module.HALF_LIFE_CAPACITIES * 2_048)  # both have as much now
    assert weights.values == pytest.approx([1.0, 1.0])
    weights.resize(1)
    assert weights.judge([0, 50], weights_module.MIN_HALF_LIFE_BLOCKS)
    lead, deviation = 200.0, math.sqrt(100**2 + 100**2 + 200**2) + 4 * least
    assert weights.values == pytest.approx([math.exp(-lead / deviation), 1.0])


def test_the_leader_is_the_heaviest_at_the_start_and_only_a_clear_lead_changes_it() -> None:
    weights = PolicyWeights((1.0, 2.0, 1.0), 64)
    assert (weights.leader, weights.changes) == (1, 0)
    assert not weights.judge([3, 3, 3], 10), "equal hits decide nothing"
    n_hits = 0
    while not weights.changes:
        assert weights.values[0] <= weights_module.LEADER_RATIO * weights.values[1]
        weights.judge([1, 0, 0], 1)
        n_hits += 1
        assert n_hits < 400
    assert (weights.leader, weights.changes) == (0, 1) and n_hits > 4
    weights.fix_policy(2)
    assert not weights.judge([9, 0, 0], 10)
    assert (weights.leader, weights.values) == (2, [0.0, 0.0, 1.0])

"""What the policies remember of blocks: kinds, waits, places in chains, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from services.kvstore.policy import history as history_module
from services.kvstore.policy.history import (
    CHAIN_END,
    FIRST_WANT,
    FREE,
    FREQUENCY_OF_KIND,
    N_GAPS,
    N_KINDS,
    BlockRecord,
    History,
    ReuseAge,
)

CAPACITY = 8


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def record_of(history: History, number: int) -> BlockRecord:
    found = history.get(key(number))
    assert found is not None
    return found


def counted(waits: Sequence[ReuseAge]) -> dict[tuple[int, int], int]:
    """Blocks by kind and age."""
    found: dict[tuple[int, int], int] = {}
    for wait in waits:
        found[wait.kind, wait.age] = found.get((wait.kind, wait.age), 0) + wait.n_blocks
    return found


def check_rows(history: History) -> None:
    """The arrays have what the records have, and nothing else."""
    for record in history.records():
        assert (history.kind[record.row], history.last[record.row]) == (record.kind, record.last)
    assert sum(kind != FREE for kind in history.kind) == len(history)


@pytest.mark.parametrize(
    ("gap", "distance"),
    [(1, 0), (CAPACITY - 1, 0), (CAPACITY, 1), (4 * CAPACITY - 1, 1), (4 * CAPACITY, 2), (999, 2)],
)
def test_the_kind_of_a_block_says_how_often_and_how_long_ago_it_was_wanted(gap: int, distance: int) -> None:
    history, other = History(CAPACITY, sample_rate=1), 1000
    frequencies = [1, 2, 3, 3, 4, 4, 4, 4, *[5] * 22, 6, 6, 6]  # of the second want, the third, ...
    history.want(keys(1))
    assert record_of(history, 1).kind == CHAIN_END
    for frequency in frequencies:
        if gap > 1:
            history.want([key(other + number) for number in range(gap - 1)])
            other += gap
        history.want(keys(1))
        kind = record_of(history, 1).kind
        assert kind == FIRST_WANT + 1 + (frequency - 1) * N_GAPS + distance < N_KINDS
        assert FREQUENCY_OF_KIND[kind] == frequency
    assert FREQUENCY_OF_KIND[: FIRST_WANT + 1] == (0, 0, 0)
    check_rows(history)


def test_neighbours_that_were_wanted_differently_often_have_their_own_kinds() -> None:
    history, alone = History(CAPACITY, sample_rate=1), History(CAPACITY, sample_rate=1)
    history.want(keys(1, 2))
    alone.want(keys(1, 2))
    for _ in range(33):
        history.want(keys(1, 2, 3))
        for number in (1, 2, 3):
            alone.want(keys(number))
        first, second, third = (record_of(history, number) for number in (1, 2, 3))
        assert first.kind == second.kind == record_of(alone, 1).kind
        assert third.kind == record_of(alone, 3).kind


def test_the_end_of_a_chain_that_is_wanted_once_has_a_kind_of_its_own() -> None:
    history = History(CAPACITY, sample_rate=1)
    path, waits = history.want(keys(1, 2, 3, 2))
    assert [record.kind for record in path] == [FIRST_WANT, FIRST_WANT, CHAIN_END] and not waits
    assert [record.depth for record in path] == [0, 1, 2]
    assert [record.parent for record in path] == [None, *path[:2]]
    assert history.now == 4 and [record.last for record in path] == [4] * 3
    path, waits = history.want(keys(1, 2, 3, 4))
    assert counted(waits) == {(FIRST_WANT, 4): 2, (CHAIN_END, 4): 1}
    assert [record.kind for record in path][3] == CHAIN_END
    assert [record.wants for record in path] == [2, 2, 2, 1]
    _, waits = history.want(keys(1))
    assert counted(waits) == {(FIRST_WANT + 1, 4 - 3): 1}
    check_rows(history)


def test_a_block_that_is_stored_before_it_is_wanted_counts_as_wanted_once() -> None:
    history = History(CAPACITY, sample_rate=1)
    history.want(keys(1, 2))
    record = history.begin(key(3))
    assert (record.kind, record.wants, record.last, record.depth) == (FIRST_WANT, 1, 2, 0)
    check_rows(history)
    _, waits = history.want(keys(3))
    assert counted(waits) == {(FIRST_WANT, 1): 1}


def test_a_block_joins_its_chain_when_no_cache_counts_on_its_place() -> None:
    history = History(CAPACITY, sample_rate=1)
    for number in (2, 3, 4):
        history.begin(key(number))
    record_of(history, 3).held = 1
    record_of(history, 4).queue = history_module.Queue()
    history.want(keys(1, 2, 3, 4))
    assert record_of(history, 2).parent is record_of(history, 1) and record_of(history, 2).depth == 1
    assert record_of(history, 3).parent is None is record_of(history, 4).parent
    history.want(keys(2, 1))  # hashes of a chain never do that; a forged message may
    assert record_of(history, 1).parent is None
    history.want(keys(7, 2))
    assert record_of(history, 2).parent is record_of(history, 1), "a block stays in its first chain"


def test_blocks_beyond_the_most_are_forgotten_but_for_those_that_a_cache_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(history_module, "MIN_GHOST_BLOCKS", 4)
    history = History(0, sample_rate=1)
    assert history.max_blocks == 4
    history.want(keys(1, 8, 2, 3))
    history.want(keys(4, 5))
    history.want(keys(6, 7))
    record_of(history, 1).held = 1
    record_of(history, 5).queue = history_module.Queue()
    # The end of a chain is older than its start: 3, 2, 8, 1 are looked at first, and 1 is held.
    assert counted(history.drop_old()) == {(CHAIN_END, 4): 1, (FIRST_WANT, 4): 2}
    assert {number for number in range(9) if history.get(key(number))} == {1, 4, 5, 6, 7}
    assert counted(history.drop_old()) == {}, "5 is next, and in the tier"
    assert counted(history.drop_old()) == {(FIRST_WANT, 2): 1}
    assert not history.drop_old() and len(history) == 4
    n_rows = len(history.last)
    history.want(keys(11, 12, 13))
    assert len(history.last) == n_rows, "rows are used again"
    check_rows(history)


@pytest.mark.parametrize(
    ("capacity", "most"), [(1, 8_193), (4_096, 20_480), (20_000, 85_536), (100_000, 200_000)]
)
def test_the_most_that_is_remembered_follows_the_capacity(capacity: int, most: int) -> None:
    history = History(1, sample_rate=1)
    history.resize(capacity, sample_rate=1)
    assert history.max_blocks == most


def test_one_block_in_the_rate_is_sampled_in_every_run() -> None:
    history = History(CAPACITY, sample_rate=4)
    path, _ = history.want([key(number) for number in range(4000)])
    sampled = [record.sampled for record in path]
    assert sampled == [history.is_sampled(record.key) for record in path]
    assert [at for at in range(28) if sampled[at]] == [1, 2, 5, 8, 10, 11, 19, 25, 27]
    assert sum(sampled) == 989
    every = History(CAPACITY, sample_rate=1)
    assert all(record.sampled for record in every.want([key(number) for number in range(99)])[0])

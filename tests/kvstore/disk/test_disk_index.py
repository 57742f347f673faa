"""The disk index finds exactly its blocks, single and in chains; evicted slots are neighbours."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.disk.table import evict
from services.kvstore.disk.table.evict import SAMPLE_STRETCH
from services.kvstore.disk.table.index import WORDS, DiskIndex, IndexColumns
from services.kvstore.disk.table.policy import DiskPolicy
from services.kvstore.disk.table.table import DiskTable
from tests.kvstore.disk.table_check import check_table
from tests.support.examples import examples

N_KEYS = 400


def key(number: int) -> bytes:
    return WORDS.pack(number * 7919 % 251, number)  # several in one bucket


@settings(max_examples=examples(10), deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_the_index_behaves_like_a_dictionary(seed: int) -> None:
    rng = random.Random(seed)
    columns = IndexColumns()
    columns.grow(N_KEYS)
    index, rows, free = DiskIndex(columns), dict[int, int](), list(range(N_KEYS))
    for _ in range(600):
        number = rng.randrange(N_KEYS)
        if number not in rows:
            row = free.pop(rng.randrange(len(free)))
            columns.cells.key[2 * row], columns.cells.key[2 * row + 1] = WORDS.unpack(key(number))
            assert index.add(key(number), row)
            columns.published[row] = True
            rows[number] = row
        elif rng.random() < 0.5:
            assert free == [] or not index.add(key(number), free[0])
        else:
            row = rows.pop(number)
            index.remove(row)
            columns.published[row] = False
            free.append(row)
            with pytest.raises(KeyError):
                index.remove(row)
        asked = [rng.randrange(N_KEYS) for _ in range(5)]
        expected = [rows.get(each, -1) for each in asked]
        assert [index.find(key(each)) for each in asked] == expected
        for _ in range(2):
            assert index.find_many([key(each) for each in asked]).tolist() == expected
        assert len(index) == len(rows)
    assert all(columns.key_of(row) == key(number) for number, row in rows.items())


@pytest.mark.parametrize("rate", [2, 7, 245])
def test_single_and_grouped_evictions_sample_alike(rate: int) -> None:
    policy = DiskPolicy(rate * 100, sampled_blocks=100)
    assert policy.rate == rate
    keys = [random.Random(n).randbytes(16) for n in range(2000)]
    many = policy.sampled(np.frombuffer(b"".join(keys), np.uint64).reshape(-1, 2))
    assert [policy._is_sampled(each) for each in keys] == many.tolist()
    assert many.any()


def test_records_of_unused_blocks_are_bounded() -> None:
    policy = DiskPolicy(64, sampled_blocks=64)
    for number in range(20_000):
        policy.published(key(number))
        policy.gone(key(number), evicted=True)
    history = policy.sampled_policy.history
    assert len(history) <= history.max_blocks + 64
    policy.sampled_policy.check()


def test_evicted_slots_are_reused_in_neighbouring_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """After several rewrites of the disk a group of blocks still gets slots in few segments."""
    monkeypatch.setattr(evict, "SAMPLE_ROWS", 256)
    n_slabs, n_slots, group = 64, 32, 32
    table = DiskTable(n_slabs=n_slabs, slab_bytes=n_slots * 2 * PAGE_BYTES)
    segments = []
    for first in range(0, 8 * n_slabs * n_slots, group):
        used = set()
        for number in range(first, first + group):
            slot = table.allocate(PAGE_BYTES, generation=number)
            assert slot is not None
            table.publish(key(number), slot, PAGE_BYTES, number + 1, bytes(16))
            used.add(slot.slab)
        segments.append(len(used))
    check_table(table)
    last = segments[len(segments) // 2 :]
    assert sum(last) / len(last) <= 2 * group / SAMPLE_STRETCH


def test_an_empty_chain_has_no_rows_after_another_lookup() -> None:
    table = DiskTable(n_slabs=2, slab_bytes=64 * PAGE_BYTES)
    keys = [number.to_bytes(16, "little") for number in range(4)]
    for generation, key in enumerate(keys):
        slot = table.allocate(PAGE_BYTES - 64, generation=generation)
        assert slot is not None
        table.publish(key, slot, PAGE_BYTES - 64, generation + 1, bytes(16))
    assert table.held(keys).all()
    block = table.get(keys[0])
    assert block is not None and table.drop(block)
    assert len(table.held([])) == 0

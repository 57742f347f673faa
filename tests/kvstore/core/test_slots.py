"""The slot table: slots are unique, held blocks stay, and free or evictable slots are found."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.dram.slots import Block, Slot, SlotTable
from tests.support.examples import examples

SLABS, SLAB_PAGES = 4, 8


class SlotTableMachine(RuleBasedStateMachine):
    """Random allocations, publishes, holds and drops, compared with a model."""

    taken: Bundle[tuple[Slot, int]] = Bundle("taken")
    holds: Bundle[Block[int]] = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.table: SlotTable[int] = SlotTable(n_slabs=SLABS, slab_bytes=SLAB_PAGES * PAGE_BYTES)
        self.owned: set[Slot] = set()
        self.held: list[Block[int]] = []
        self.next_key = 0

    @rule(target=taken, n_pages=st.integers(1, 3), odd=st.booleans())
    def allocate(self, n_pages: int, odd: bool) -> tuple[Slot, int] | MultipleResults[tuple[Slot, int]]:
        n_bytes = n_pages * PAGE_BYTES - (7 if odd else 0)
        slot = self.table.allocate(n_bytes)
        if slot is None:
            return multiple()
        assert slot.slot_bytes == n_pages * PAGE_BYTES
        for other in self.owned | {block.slot for block in self.held}:
            assert not _overlap(slot, other)
        self.owned.add(slot)
        return slot, n_bytes

    @rule(slot=consumes(taken))
    def publish(self, slot: tuple[Slot, int]) -> None:
        self.next_key += 1
        self.owned.remove(slot[0])
        self.table.publish(self.next_key.to_bytes(16), slot[0], slot[1], self.next_key)

    @rule(slot=consumes(taken))
    def free(self, slot: tuple[Slot, int]) -> None:
        self.owned.remove(slot[0])
        self.table.free(slot[0])

    @rule(target=holds, number=st.integers(1, 60))
    def hold(self, number: int) -> Block[int] | MultipleResults[Block[int]]:
        block = self.table.get(number.to_bytes(16))
        if block is None:
            return multiple()
        self.table.hold(block)
        self.held.append(block)
        return block

    @rule(block=consumes(holds))
    def unhold(self, block: Block[int]) -> None:
        self.held.remove(block)
        self.table.unhold(block)

    @rule(number=st.integers(1, 60))
    def drop(self, number: int) -> None:
        block = self.table.get(number.to_bytes(16))
        if block is not None:
            self.table.drop(block)
            self.table.drop(block)

    @rule(chain=st.lists(st.integers(1, 60), max_size=5))
    def touch(self, chain: list[int]) -> None:
        self.table.touch([number.to_bytes(16) for number in chain])

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        self.table.check()

    @invariant()
    def held_blocks_stay_unless_they_were_dropped(self) -> None:
        for block in self.held:
            assert block.gone or self.table.get(block.key) is block


def _overlap(a: Slot, b: Slot) -> bool:
    def span(slot: Slot) -> range:
        return range(slot.index * slot.slot_bytes, (slot.index + 1) * slot.slot_bytes)

    return a.slab == b.slab and span(a).start < span(b).stop and span(b).start < span(a).stop


TestSlotTable = SlotTableMachine.TestCase
TestSlotTable.settings = settings(max_examples=examples(15), stateful_step_count=40, deadline=None)


def filled(n_blocks: int, *, n_slabs: int = 1) -> SlotTable[int]:
    table: SlotTable[int] = SlotTable(n_slabs=n_slabs, slab_bytes=n_blocks * PAGE_BYTES)
    for number in range(n_blocks * n_slabs):
        put(table, number)
    return table


def key(number: int) -> bytes:
    return number.to_bytes(16)


def put(table: SlotTable[int], number: int, n_pages: int = 1) -> Slot | None:
    slot = table.allocate(n_pages * PAGE_BYTES)
    if slot is not None:
        table.publish(key(number), slot, n_pages * PAGE_BYTES, number)
    return slot


def test_the_least_recently_used_block_is_evicted_first_and_a_chain_from_its_end() -> None:
    table = filled(6)
    table.policy(PAGE_BYTES).fix_policy(0)  # LRU
    table.touch([key(0), key(1), key(2)])
    for number in (10, 11, 12, 13, 14):
        table.touch([key(number)])  # a request wants a block before a worker stores it
        put(table, number)
    assert table.get(key(0)) is not None
    assert all(table.get(key(gone)) is None for gone in (3, 4, 5, 2, 1))
    assert table.evictions == 5


def test_held_blocks_leave_no_room_until_they_are_released() -> None:
    table = filled(4)
    blocks = [table.get(key(number)) for number in range(4)]
    for block in blocks:
        assert block is not None
        table.hold(block)
    assert table.allocate(PAGE_BYTES) is None
    assert blocks[2] is not None
    table.unhold(blocks[2])
    assert put(table, 9) is not None
    assert table.get(key(2)) is None


def test_a_slab_is_cut_for_another_size_when_its_blocks_may_be_evicted() -> None:
    table = filled(4, n_slabs=2)
    kept = table.get(key(0))
    assert kept is not None
    table.hold(kept)
    slots = [put(table, number, n_pages=2) for number in (20, 21)]
    assert all(slot is not None and slot.slab != kept.slot.slab for slot in slots)
    assert table.get(key(0)) is kept
    assert table.n_blocks == 6
    table.check()


@pytest.mark.parametrize("n_bytes", [0, -1, 4 * PAGE_BYTES + 1])
def test_a_block_too_large_for_a_slab_evicts_nothing(n_bytes: int) -> None:
    table = filled(4)
    assert table.allocate(n_bytes) is None
    assert table.n_blocks == 4


def test_publishing_a_block_twice_and_unholding_too_often_are_defects() -> None:
    table = filled(4)
    slot = table.allocate(PAGE_BYTES)
    assert slot is not None
    with pytest.raises(ValueError, match="already"):
        table.publish(key(3), slot, 1, 1)
    block = table.get(key(3))
    assert block is not None
    with pytest.raises(ValueError, match="not held"):
        table.unhold(block)


def test_blocks_of_a_second_size_are_stored_when_memory_is_full_of_the_first() -> None:
    table: SlotTable[int] = SlotTable(n_slabs=4, slab_bytes=8 * PAGE_BYTES)

    def store(first: int, n_blocks: int, n_bytes: int) -> int:
        keys = [number.to_bytes(16) for number in range(first, first + n_blocks)]
        table.touch(keys)
        stored = 0
        for key in table.offer([key for key in keys if table.get(key) is None], n_bytes):
            slot = table.allocate(n_bytes)
            if slot is not None:
                table.publish(key, slot, n_bytes, 0)
                stored += 1
        return stored

    assert store(0, 32, PAGE_BYTES) == 32
    assert store(100, 3, 2 * PAGE_BYTES) == 3
    assert store(200, 3, 2 * PAGE_BYTES) == 3  # one slab has 4 slots: two of the first blocks went
    assert sum(table.get(number.to_bytes(16)) is not None for number in range(32)) == 24
    table.check()

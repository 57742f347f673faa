"""The order of pins that share one disk: short pins overtake long ones, and none ends late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.disk.queues.reads import OnRead, ReadResult
from services.kvstore.loading.pin_order import PinOrder
from services.kvstore.loading.promotion import CONCURRENT
from tests.kvstore.store_rig import Rig, key, keys

# For each pin: its arrival, in blocks that the disk has read by then, and its number of blocks.
Arrivals = list[tuple[int, int]]
ARRIVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 25)), min_size=1, max_size=12)
FEW = st.integers(1, 12)


def ends_when_shared(arrivals: Arrivals) -> list[Fraction]:
    """Return when each pin would end if all waiting pins shared the disk equally."""
    left = [Fraction(n_blocks) for _, n_blocks in arrivals]
    ends: dict[int, Fraction] = {}
    now = Fraction(0)
    while len(ends) < len(arrivals):
        here = [pin for pin, (arrival, _) in enumerate(arrivals) if arrival <= now and pin not in ends]
        later = [arrival - now for arrival, _ in arrivals if arrival > now]
        if not here:
            now += min(later)
            continue
        step = min([min(left[pin] for pin in here) * len(here), *later])
        now += step
        for pin in here:
            left[pin] -= step / len(here)
            if not left[pin]:
                ends[pin] = now
    return [ends[pin] for pin in range(len(arrivals))]


def order_read(arrivals: Arrivals) -> list[tuple[int, int]]:
    """Return the block read at each moment as pin and position, or (-1, 0) for no block."""
    order: PinOrder[int] = PinOrder()
    owners = {
        bytes([pin, at]): (pin, at) for pin, (_, n_blocks) in enumerate(arrivals) for at in range(n_blocks)
    }
    read: list[tuple[int, int]] = []
    left = len(owners)
    while left:
        for pin, (arrival, n_blocks) in enumerate(arrivals):
            if arrival == len(read):
                order.add(pin, [bytes([pin, at]) for at in range(n_blocks)])
        first = order.first()
        if first is None:
            read.append((-1, 0))
            continue
        order.begin_read(first, [owners[first][0]])
        read.append(owners[first])
        left -= 1
    assert order.first() is None and len(order) == 0
    return read


@given(ARRIVALS)
def test_no_pin_ends_more_than_one_block_later_than_under_equal_sharing(arrivals: Arrivals) -> None:
    read = order_read(arrivals)
    for pin, shared_end in enumerate(ends_when_shared(arrivals)):
        mine = [(at, position) for at, (owner, position) in enumerate(read) if owner == pin]
        assert [position for _, position in mine] == list(range(arrivals[pin][1]))
        assert mine[-1][0] + 1 <= shared_end + 1 + Fraction(1, 10**6)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), FEW)
def test_pins_of_equal_length_keep_their_arrival_order(arrival: list[int], n_blocks: int) -> None:
    read = [block for block in order_read([(at, n_blocks) for at in sorted(arrival)]) if block[0] >= 0]
    assert read == [(pin, at) for pin in range(len(arrival)) for at in range(n_blocks)]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.lists(st.integers(0, 30), min_size=1, max_size=14, unique=True)),
        st.tuples(st.just("take"), st.lists(st.none(), max_size=9)),
        st.tuples(st.just("come otherwise"), st.lists(st.integers(0, 30), max_size=9)),
        st.tuples(st.just("leave"), st.lists(st.integers(0, 20), max_size=1)),
    ),
    max_size=40,
)


@given(OPERATIONS)
def test_every_wanted_block_is_read_once_while_pins_start_and_end(
    operations: list[tuple[str, list[int]]],
) -> None:
    order: PinOrder[int] = PinOrder()
    wanted: dict[int, list[bytes]] = {}
    n_came = 0

    def take() -> None:
        first = order.first()
        assert (first is None) == (not wanted)
        if first is None:
            return
        pins = [pin for pin, blocks in wanted.items() if first in blocks]
        assert any(wanted[pin][0] == first for pin in pins)
        order.begin_read(first, pins)
        assert_not_wanted(first, pins)

    def assert_not_wanted(block: bytes, pins: list[int]) -> None:
        for pin in pins:
            wanted[pin].remove(block)
            if not wanted[pin]:
                del wanted[pin]

    for operation, numbers in operations:
        if operation == "add":
            wanted[n_came] = keys(*numbers)
            order.add(n_came, wanted[n_came])
            n_came += 1
        elif operation == "take":
            for _ in numbers:
                take()
        elif operation == "come otherwise":
            for block in keys(*numbers):
                pins = [pin for pin, blocks in wanted.items() if block in blocks]
                order.discard(block, pins)
                assert_not_wanted(block, pins)
        else:
            for pin in numbers:
                order.remove(pin)
                wanted.pop(pin, None)
        assert len(order) == len(wanted)
    while wanted:
        take()
    assert order.first() is None and len(order) == 0
    assert not order._ends and not order._ranked and not order._ranks


def test_a_cancelled_pin_has_no_share_of_the_disk() -> None:
    order: PinOrder[str] = PinOrder()
    order.add("long", keys(*range(20)))
    order.add("left", keys(*range(100, 200)))
    order.remove("left")
    for number in range(15):
        assert order.first() == key(number)
        order.begin_read(key(number), ["long"])
    order.add("later", keys(*range(300, 306)))  # the long pin has five left
    assert order.first() == key(15)


@pytest.fixture
async def large_rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A rig with enough memory for long pins."""
    made = Rig(tmp_path, dram_blocks=8 * CONCURRENT)
    made.store.start()
    yield made
    made.io.gate.set()
    await made.store.close(flush_timeout_s=60)
    made.disk.close()


async def test_a_pin_of_one_block_does_not_wait_for_the_whole_of_a_long_one(
    large_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig, n_long = large_rig, 6 * CONCURRENT
    for first in range(0, n_long, 16):
        await rig.to_disk_only(range(first, first + 16))
    await rig.to_disk_only([9999])
    n_slots = rig.dram.table.n_free + rig.dram.table.n_blocks
    order: list[bytes] = []  # the order of blocks at the disk
    read_many = rig.disk.read_many

    async def recorded(wanted: Sequence[tuple[bytes, int]], *, on_read: OnRead) -> list[ReadResult]:
        order.extend(each for each, _ in wanted)
        return await read_many(wanted, on_read=on_read)

    monkeypatch.setattr(rig.disk, "read_many", recorded)
    assert rig.store.promoter is not None
    long = rig.store.promoter.promote(keys(*range(n_long)))
    gone = rig.store.promoter.promote(keys(5, n_long - 1, n_long - 2))
    short = rig.store.promoter.promote(keys(9999, n_long - 1))
    gone.close()
    await asyncio.gather(long.wait(timeout_s=100), short.wait(timeout_s=100))
    # Blocks that are already at the disk are read before the short pin, the others after it.
    others = [number for number in range(CONCURRENT, n_long) if number != n_long - 1]
    assert order == keys(*range(CONCURRENT), 9999, n_long - 1, *others)
    assert long.loaded_blocks == n_long and short.loaded_blocks == 2
    long.close()
    short.close()
    assert rig.at_rest() and rig.dram.table.n_free + rig.dram.table.n_blocks == n_slots

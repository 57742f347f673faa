"""Adoption of pool copies after their putter left, and eviction counts, with a real master."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.checksum import checksum
from services.kvstore.pool import adoption, watch
from services.kvstore.pool.adoption import BlockAdoption
from services.kvstore.pool.value import (
    HEADER_BYTES,
    ValueOrigin,
    header_checksum,
    pack_header,
    read_hint,
    tag_of,
)
from services.kvstore.unreachable import watch as unreachable_watch
from tests.kvstore.pool.pool_rig import Member, key
from tests.support.processes.pool_process import PoolMaster

NAMES = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
KEYS = [key(number) for number in range(1, 400)]


class _Watched:
    """What a node watches, in a dict: each block to its predecessor."""

    def __init__(self, watched: dict[bytes, bytes]) -> None:
        self._watched = watched

    def __contains__(self, key: object) -> bool:
        return key in self._watched

    def put(self, key: bytes, before: bytes) -> None:
        self._watched[key] = before

    def discard(self, keys: Sequence[bytes]) -> None:
        for each in keys:
            del self._watched[each]


def share_of(watched: dict[bytes, bytes]) -> BlockAdoption:
    """Return a node's share of the blocks; `watched` maps each block to its predecessor."""
    return BlockAdoption(_Watched(watched))


@given(
    before=st.binary(min_size=16, max_size=16),
    flip=st.integers(0, HEADER_BYTES * 8 - 1),
    putter=st.sampled_from(NAMES),
)
def test_a_hint_is_read_unchanged_or_not_at_all(before: bytes, flip: int, putter: str) -> None:
    hint = ValueOrigin(before, tag_of(putter))
    header = bytearray(pack_header(KEYS[0], 5, checksum(b"hello"), hint))
    assert len(header) == HEADER_BYTES
    assert read_hint(memoryview(header), KEYS[0]) == (hint if any(before) else None)
    assert read_hint(memoryview(header), KEYS[1]) is None
    assert header_checksum(memoryview(bytes(header) + b"hello"), KEYS[0]) == checksum(
        b"hello"
    )  # of any version
    older = pack_header(KEYS[0], 5, checksum(b"hello"))
    assert read_hint(memoryview(older), KEYS[0]) is None
    header[flip // 8] ^= 1 << flip % 8
    assert read_hint(memoryview(header), KEYS[0]) in (hint, None)


def test_each_block_has_one_adopter_and_few_change_with_the_members() -> None:
    def adopters(names: list[str]) -> list[str]:
        shares = {name: share_of({}) for name in names}
        for name, share in shares.items():
            share.set_members(names, own=name)
        found = []
        for each in KEYS:
            (adopter,) = [name for name, share in shares.items() if share.is_adopter(each)]
            found.append(adopter)
        return found

    three, two = adopters(NAMES), adopters(NAMES[:2])
    assert all(100 < three.count(name) < 170 for name in NAMES)
    assert all(new == old for new, old in zip(two, three, strict=True) if old != NAMES[2])


def test_headers_are_read_at_a_bounded_rate_and_once() -> None:
    adopted: dict[bytes, bytes] = {}
    share = share_of(adopted)
    assert share.poll(lambda: KEYS) == []  # the members are unknown
    share.set_members(NAMES[1:], own=NAMES[0])
    assert share.poll(lambda: KEYS) == []  # this node has no segment
    share.set_members(NAMES[:1], own=NAMES[0])
    read: list[bytes] = []
    for _ in range(30):
        wanted = share.poll(lambda: KEYS)
        assert len(wanted) <= adoption.READ_BLOCKS
        for number, each in enumerate(wanted, start=len(read)):
            putter = NAMES[number % 2]
            share.add_hint(each, ValueOrigin(KEYS[0], tag_of(putter)) if number % 3 else None)
        read += wanted
    assert sorted(read) == sorted(KEYS)
    assert set(adopted) == {each for number, each in enumerate(read) if number % 2 and number % 3}
    share.set_members([], own=NAMES[0])
    assert share.poll(lambda: KEYS) == []


def test_blocks_that_another_node_watches_again_are_released() -> None:
    """The putter may only have been silent, or a new node joined. A node keeps its own puts."""
    own, watched = KEYS[0], dict[bytes, bytes]()
    share = share_of(watched)
    hint = ValueOrigin(KEYS[-1], tag_of(NAMES[1]))

    def read(living: list[str]) -> None:
        share.set_members(living, own=NAMES[0])
        for _ in range(20):
            for each in share.poll(lambda: KEYS):
                share.add_hint(each, hint)

    read(NAMES[:1])
    assert set(watched) == set(KEYS)
    share.discard_hints([own])  # this node has put the block meanwhile
    read(NAMES[:2])
    assert set(watched) == {own}
    read(NAMES[:1])
    assert set(watched) == set(KEYS)
    share.discard_hints([own])
    read([NAMES[0], NAMES[2]])
    assert set(watched) == {own, *filter(share.is_adopter, KEYS)} and len(watched) < len(KEYS)


def test_the_header_of_a_replaced_value_is_read_again() -> None:
    watched: dict[bytes, bytes] = {}
    share = share_of(watched)
    share.set_members(NAMES[:2], own=NAMES[0])
    mine = [each for each in KEYS if share.is_adopter(each)][:2]
    for gone in (lambda: share.discard_hints(mine[:1]), lambda: share.poll(lambda: mine[1:])):
        assert mine[0] in share.poll(lambda: mine)
        for each in mine:
            share.add_hint(each, None)  # a header without a hint
        for _ in range(3):
            assert share.poll(lambda: mine) == []
        gone()
    assert share.poll(lambda: mine) == mine[:1]


@pytest.fixture
async def members(master: PoolMaster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[Member]]:
    """Two members of a pool, each with a segment and a fast watch."""
    monkeypatch.setattr(watch, "LIST_EVERY_S", 0.1)
    monkeypatch.setattr(watch, "LIST_PART", 1.0)
    made = [Member(master.address, segment_bytes=16 << 20, admin=master.admin) for _ in range(2)]
    for each in made:
        await each.until(unavailable=False)
    yield made
    for each in made:
        await each.close()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(200):
        while not true():
            await asyncio.sleep(0.02)


@pytest.mark.timeout(400)
async def test_unreachable_copies_of_a_dead_node_are_dropped_by_another(
    members: list[Member], master: PoolMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unreachable_watch, "GRACE_S", 0.5)
    putter = Member(
        master.address, segment_bytes=16 << 20, replicas=3, admin=master.admin
    )  # a copy on each node
    await putter.until(unavailable=False)
    numbers = range(1, 9)
    chain = [key(number) for number in numbers]
    await putter.put([0])  # creates the eviction policy
    putter.dram.table.touch(chain)
    await putter.put(numbers)
    await until(lambda: all(set(chain) <= set(each.pool.inventory.keys()) for each in members))
    assert not any(each.pool.watch.adoption.adopted_blocks for each in members)
    await putter.close()  # as after a restart: no node remembers the puts
    assert await members[0].find(numbers) == set(numbers)
    await until(lambda: sum(each.pool.watch.adoption.adopted_blocks for each in members) >= len(chain) - 1)
    await members[0].pool.drop([chain[4]])
    await until(lambda: not any(set(chain[4:]) & set(each.pool.inventory.keys()) for each in members))
    dropped = [each.pool.metrics()["slipstream_kvstore_unreachable_dropped_pool_total"] for each in members]
    assert sum(dropped) >= 3
    assert await members[1].find(numbers) == {1, 2, 3, 4}


@pytest.mark.soak  # the short form, without a master, is in test_pool_watch.py
@pytest.mark.timeout(400)
async def test_requests_for_blocks_that_the_pool_evicted_are_counted(members: list[Member]) -> None:
    one = members[0]
    numbers = list(range(1000, 1100))
    await one.put(numbers)
    known = {key(number) for number in numbers}
    await until(lambda: known <= set(one.pool.inventory.keys()))

    def gone() -> set[bytes]:
        return known - set(one.pool.inventory.keys())

    number = 2000
    async with asyncio.timeout(300):
        while not gone():  # until the master evicts
            await members[1].put(range(number, number + 50))
            number += 50
            await asyncio.sleep(0.2)
    lost = sorted(gone())
    one.pool.record_request(lost)
    figures = one.pool.metrics()
    assert figures["slipstream_kvstore_evicted_rerequested_pool_total"] == len(lost)
    assert figures["slipstream_kvstore_evicted_rerequested_pool_gap_seconds_total"] > 0

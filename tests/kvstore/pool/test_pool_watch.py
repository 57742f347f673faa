"""The watch of the pool: lists, and drops of unreachable copies."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from libs.common.checksum import checksum_at
from services.kvstore.dram.tier import DramTier
from services.kvstore.pool.config import PoolOptions
from services.kvstore.pool.inventory import Inventory
from services.kvstore.pool.tier import PoolTier
from services.kvstore.pool.watch import PoolWatch
from services.kvstore.unreachable.watch import GRACE_S
from slipstream.errors import Unavailable
from tests.kvstore.pool.memory_pool import MemoryPool

KEYS = [bytes([number]) * 16 for number in range(8)]


class _Owner:
    """A node without other tiers."""

    def __init__(self, inventory: Inventory, dropped: list[bytes]) -> None:
        self._inventory, self._dropped = inventory, dropped

    def is_usable(self, key: bytes) -> bool:
        return key in self._inventory

    def dropped(self, keys: Sequence[bytes]) -> None:
        self._dropped.extend(keys)


def watch_of(client: Any, inventory: Inventory, dropped: list[bytes] | None = None) -> PoolWatch:
    """Return a watch of a node without other tiers that appends dropped blocks to `dropped`."""
    return PoolWatch(client, inventory, _Owner(inventory, [] if dropped is None else dropped))


async def test_a_failed_list_changes_nothing_and_the_next_list_is_whole() -> None:
    asked: list[bool] = []
    answers: list[Any] = [
        {"new": [KEYS[0].hex()], "gone": [], "more": False},
        {"list_error": "connection refused"},
        {"new": [KEYS[0].hex()], "gone": [], "more": False},
        Unavailable("late"),
        {"new": [KEYS[1].hex()], "gone": [], "more": False},
    ]

    async def call(kind: str, *, timeout_s: float, whole: bool) -> Any:
        asked.append(whole)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    client: Any = SimpleNamespace(available=True, call=call, segment="")
    inventory = Inventory()
    watch = watch_of(client, inventory)
    for _ in range(3):
        assert not await watch.update_inventory()
        assert inventory.keys() == KEYS[:1]
    with pytest.raises(Unavailable):
        await watch.update_inventory()
    assert inventory.keys() == KEYS[:1]
    await watch.update_inventory()
    assert inventory.keys() == KEYS[1:2]
    assert asked == [True, False, True, False, True]


async def test_unreachable_copies_are_dropped_from_the_pool_and_reported() -> None:
    calls: list[Any] = []

    async def call(kind: str, *, timeout_s: float, keys: list[str]) -> Any:
        calls.append((kind, keys))
        return {"dropped": len(keys)}

    client: Any = SimpleNamespace(available=True, call=call, segment="")
    inventory = Inventory()
    dropped: list[bytes] = []
    watch = watch_of(client, inventory, dropped)
    inventory.add(KEYS[:3])
    for before, key in itertools.pairwise(KEYS[:3]):
        watch.unreachable.put(key, before)
    inventory.remove(KEYS[:1])
    await watch.drop_unreachable(now_s=0)
    assert calls == []
    await watch.drop_unreachable(now_s=GRACE_S)
    assert calls == [("drop", [KEYS[1].hex()])]
    assert inventory.keys() == KEYS[2:3]
    assert dropped == KEYS[1:2]
    assert watch.unreachable.dropped_blocks == 1


async def test_a_dropped_unreachable_copy_does_not_count_as_a_restart_of_the_master() -> None:
    """A restart of the master would make the node put all its blocks again."""
    options = PoolOptions("127.0.0.1:1", staging_bytes=4 << 20)
    client: Any = MemoryPool(options)
    dram = DramTier(1 << 20)
    pool = PoolTier(dram, options, client)
    key = KEYS[1]
    slot = dram.table.allocate(4096)
    assert slot is not None
    dram.table.publish(key, slot, 4096, checksum_at(dram.address_of(slot), 4096))
    pool.offer([key])
    assert await pool.writes.flush(timeout_s=30)
    assert pool.known() == [key]
    pool.watch.unreachable.put(key, KEYS[0])
    for now_s in (0.0, GRACE_S):
        await pool.watch.drop_unreachable(now_s=now_s)
    assert not client.values
    assert pool.known() == pool.writes.probe_sample() == []
    await pool.close(flush_timeout_s=1)


async def test_no_copy_is_dropped_while_the_inventory_is_truncated() -> None:
    """A predecessor may be among the blocks beyond the bound."""
    there = KEYS[:4]
    calls: list[str] = []

    async def call(kind: str, **fields: Any) -> Any:
        calls.append(kind)
        return {"new": [key.hex() for key in there], "gone": [], "more": False, "dropped": 1}

    client: Any = SimpleNamespace(available=True, call=call, segment="")
    for max_blocks in (3, 4, 5):  # 4: the list fills the bound, so there may be more
        calls.clear()
        inventory = Inventory(max_blocks=max_blocks)
        watch = watch_of(client, inventory)
        await watch.update_inventory()
        watch.unreachable.put(inventory.keys()[0], KEYS[5])
        inventory.remove(inventory.keys()[1:2])
        assert inventory.knows_all is (max_blocks == 5)
        for now_s in (0.0, GRACE_S):
            await watch.drop_unreachable(now_s=now_s)
        assert calls == ["list"] + ["drop"] * inventory.knows_all
        inventory.clear()
        assert inventory.knows_all


@pytest.mark.parametrize("how", ["the pool was unavailable meanwhile", "not understood"])
async def test_a_whole_list_follows_a_lost_one(how: str) -> None:
    asked: list[bool] = []
    inventory = Inventory()

    async def call(kind: str, *, timeout_s: float, whole: bool) -> Any:
        asked.append(whole)
        new = [key.hex() for key in (KEYS[:3] if whole else KEYS[2:3])]
        if len(asked) == 2 and how == "not understood":
            new = ["zz"]
        elif len(asked) == 2:
            watch.clear()
        return {"new": new, "gone": [], "more": False}

    client: Any = SimpleNamespace(available=True, call=call, segment="")
    watch = watch_of(client, inventory)
    for _ in range(3):
        with contextlib.suppress(ValueError):
            await watch.update_inventory()
    assert asked == [True, False, True]
    assert set(inventory.keys()) == set(KEYS[:3])


async def test_requests_for_blocks_that_left_the_list_are_counted() -> None:
    options = PoolOptions("127.0.0.1:1", staging_bytes=4 << 20)
    answers = [(KEYS[:5], []), ([], KEYS[1:3])]

    async def call(kind: str, *, timeout_s: float, whole: bool) -> Any:
        new, gone = answers.pop(0)
        return {"new": [key.hex() for key in new], "gone": [key.hex() for key in gone], "more": False}

    client: Any = MemoryPool(options)
    client.call = call
    pool = PoolTier(DramTier(1 << 20), options, client)
    for _ in range(2):
        await pool.watch.update_inventory()
    pool.record_request(KEYS)
    figures = pool.metrics()
    assert figures["slipstream_kvstore_evicted_rerequested_pool_total"] == 2
    assert figures["slipstream_kvstore_evicted_rerequested_pool_gap_seconds_total"] > 0

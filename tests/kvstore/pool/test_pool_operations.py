"""Verify and drop by operators, with some of the blocks in the pool."""

from __future__ import annotations

from typing import Any

from libs.common.checksum import checksum, memory_at
from libs.common.telemetry.counters import Counters
from services.kvstore.core.store import BlockStore
from services.kvstore.dram.tier import DramTier
from services.kvstore.loading.tombstones import Tombstones
from services.kvstore.operations import Dropped, Operations
from slipstream.errors import NotFound, Unavailable

WHOLE, ROTTEN, GONE, SILENT, HERE = (bytes([number]) * 16 for number in range(5))


class FakePool:
    """A pool with four blocks, one of each kind."""

    held_blocks = 0

    def use_tombstones(self, drops: Tombstones) -> None:
        """Ignored: these tests load nothing."""

    def __init__(self, *, unavailable: bool = False) -> None:
        self._unavailable = unavailable

    def known(self) -> list[bytes]:
        return [WHOLE, ROTTEN, GONE, SILENT]

    async def verify(self, key: bytes) -> bool:
        if key == GONE:
            raise NotFound("no such block in the pool")
        if key == SILENT:
            raise Unavailable("no node of the pool gives the block")
        return key == WHOLE

    async def drop(self, keys: list[bytes] | None) -> int:
        if self._unavailable:
            raise Unavailable("the pool is unavailable")
        return len(self.known() if keys is None else keys)


def operations(*, unavailable: bool = False) -> Operations:
    dram = DramTier(1 << 20)
    slot = dram.table.allocate(100)
    assert slot is not None
    memory_at(dram.address_of(slot), 100)[:] = bytes(100)
    dram.table.publish(HERE, slot, 100, checksum(bytes(100)))
    pool: Any = FakePool(unavailable=unavailable)
    return Operations(BlockStore(dram, None, Counters(), now_ms=lambda: 0.0, pool=pool))


async def test_verify_includes_the_pool() -> None:
    *_, (progress, last) = [each async for each in operations().verify([])]
    assert last
    assert (progress.copies, progress.verified, progress.unreadable) == (5, 5, 1)
    assert progress.corrupt == [ROTTEN]
    *_, (progress, _) = [each async for each in operations().verify([HERE, WHOLE])]
    assert (progress.copies, progress.corrupt) == (2, [])


async def test_a_drop_reports_whether_the_pool_kept_its_copies() -> None:
    assert await operations().drop(None) == Dropped(copies=5, blocks=1)
    assert await operations().drop([HERE, WHOLE]) == Dropped(copies=3, blocks=1)
    assert await operations(unavailable=True).drop(None) == Dropped(copies=1, blocks=1, pool_kept=True)

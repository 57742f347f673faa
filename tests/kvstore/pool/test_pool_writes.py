"""Puts into a pool that answers at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

from libs.common.checksum import checksum
from services.kvstore.dram.tier import DramTier
from services.kvstore.pool.agent_client import AgentClient
from services.kvstore.pool.config import PoolOptions
from services.kvstore.pool.writes import PoolWrites
from slipstream.errors import Unavailable
from tests.kvstore.pool.pool_rig import BLOCK_BYTES, key
from tests.support.processes.process_checks import eventually

WAIT_S = 100.0


@dataclasses.dataclass
class Pool:
    """A pool client that has some blocks and stores none."""

    has: set[bytes] = dataclasses.field(default_factory=set)
    available: bool = True
    options: PoolOptions = dataclasses.field(default_factory=lambda: PoolOptions("127.0.0.1:1"))

    async def call(self, kind: str, *, timeout_s: float, keys: Sequence[str]) -> dict[str, Any]:
        assert kind == "find"
        return {"sizes": [int(bytes.fromhex(text) in self.has) for text in keys]}

    async def stage(self, sizes: Sequence[int], *, timeout_s: float) -> None:
        raise Unavailable("no room")


def writes_with(pool: Pool) -> tuple[DramTier, PoolWrites]:
    dram = DramTier(16 << 20)
    return dram, PoolWrites(dram, cast(AgentClient, pool))


def publish(dram: DramTier, number: int) -> None:
    slot = dram.table.allocate(BLOCK_BYTES)
    assert slot is not None
    dram.table.publish(key(number), slot, BLOCK_BYTES, checksum(b""))


async def test_a_block_dropped_before_its_put_is_released_once() -> None:
    dram, writes = writes_with(Pool({key(1)}))
    publish(dram, 1)
    writes.offer([key(1)])
    block = dram.get(key(1))
    assert block is not None
    dram.table.drop(block)
    publish(dram, 2)  # must not reuse the first block's slot, which is about to be read
    second = dram.get(key(2))
    assert second is not None and second.slot != block.slot
    assert await writes.flush(timeout_s=WAIT_S)
    dram.table.check()
    assert dram.table.n_evictable == dram.table.n_blocks == 1
    await writes.close(timeout_s=WAIT_S)


async def test_a_cancel_clears_the_tries_of_its_blocks() -> None:
    pool = Pool()
    dram, writes = writes_with(pool)
    publish(dram, 1)
    publish(dram, 2)
    writes.offer([key(1), key(2)])
    await eventually(lambda: len(writes._tries) == 2)
    pool.has = {key(1)}  # another node has put it
    writes.cancel([key(2)])
    assert await writes.flush(timeout_s=WAIT_S)
    assert not writes._tries
    await writes.close(timeout_s=WAIT_S)

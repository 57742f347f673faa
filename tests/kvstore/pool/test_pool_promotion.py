"""Slots are freed if loaded pool blocks cannot be copied into them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import services.kvstore.pool.promotion as pool_promotion
from libs.common.checksum import KvChecksum, checksum
from services.kvstore.dram.tier import DramTier
from services.kvstore.pool.agent.staging import Extents, SharedMemory
from services.kvstore.pool.agent_client import Staged
from services.kvstore.pool.promotion import PoolPromoter
from services.kvstore.pool.value import HEADER_BYTES, header_proof, pack_header, proof_of, verify_value
from tests.support.processes.process_checks import eventually

PAYLOAD = bytes(range(256)) * 16
KEYS = [bytes([number]) * 16 for number in range(4)]
VALUE_BYTES = HEADER_BYTES + len(PAYLOAD)


class FakeClient:
    """A pool client that answers every get with whole values."""

    options = SimpleNamespace(staging_bytes=1 << 20)

    def __init__(self) -> None:
        self.memory = SharedMemory(1 << 20)
        self._extents = Extents(1 << 20)

    async def stage(self, sizes: list[int], *, timeout_s: float) -> Staged:
        taken = [self._extents.allocate(n_bytes) for n_bytes in sizes]
        return Staged([extent for extent in taken if extent is not None])

    async def call(self, kind: str, *, keys: list[str], at: list[int], sizes: list[int], **_: Any) -> Any:
        for key, offset, n_bytes in zip(keys, at, sizes, strict=True):
            whole = pack_header(bytes.fromhex(key), len(PAYLOAD), checksum(PAYLOAD)) + PAYLOAD
            self.memory.view(offset, n_bytes)[:] = whole
        return {"outcome": sizes, "failovers": 0}

    def release(self, staged: Staged, user: str) -> None:
        """The extents of a test are used only once."""


@pytest.fixture
def promoter() -> Iterator[PoolPromoter]:
    client: Any = FakeClient()
    yield PoolPromoter(DramTier(1 << 20), client)
    client.memory.close()


def free_slots(promoter: PoolPromoter) -> int:
    """Count the free slots of the blocks' size."""
    table = promoter.dram.table
    slot = table.allocate(len(PAYLOAD))
    assert slot is not None
    table.free(slot)
    return table.n_free


async def test_slots_are_freed_when_no_copy_thread_is_available(promoter: PoolPromoter) -> None:
    before = free_slots(promoter)
    gone = ThreadPoolExecutor(1)
    gone.shutdown()
    asyncio.get_running_loop().set_default_executor(gone)
    promotion = promoter.promote(dict.fromkeys(KEYS, VALUE_BYTES))
    await promotion.wait(timeout_s=30)
    assert [promotion.pop(key) for key in KEYS] == [None] * len(KEYS)
    promotion.close()
    assert promoter.dram.table.n_blocks == 0
    assert free_slots(promoter) == before
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    promotion = promoter.promote(dict.fromkeys(KEYS, VALUE_BYTES))
    await promotion.wait(timeout_s=30)
    blocks = [promotion.pop(key) for key in KEYS]
    assert all(block is not None for block in blocks)
    assert promoter.dram.table.n_blocks == len(KEYS)


async def test_slots_of_a_cancelled_load_are_freed_after_the_copy(
    promoter: PoolPromoter, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = free_slots(promoter)
    copying, go_on = threading.Event(), threading.Event()
    copied = pool_promotion._copied

    def slowly(copies: list[tuple[int, int, int]], checksum: KvChecksum) -> list[bytes]:
        copying.set()
        assert go_on.wait(30)
        return copied(copies, checksum)

    monkeypatch.setattr(pool_promotion, "_copied", slowly)
    tasks_before = asyncio.all_tasks()
    promotion = promoter.promote(dict.fromkeys(KEYS, VALUE_BYTES))
    (load,) = asyncio.all_tasks() - tasks_before
    assert await asyncio.to_thread(copying.wait, 30)
    load.cancel()
    await asyncio.wait({load}, timeout=60)
    assert load.cancelled()
    assert free_slots(promoter) == before - len(KEYS)
    go_on.set()
    await eventually(lambda: free_slots(promoter) == before, timeout_s=60)
    assert [promotion.pop(key) for key in KEYS] == [None] * len(KEYS)
    promotion.close()


@pytest.mark.parametrize("forged", ["nothing", "payload", "another block's payload", "plain checksum"])
async def test_a_value_that_another_process_wrote_into_the_pool_is_not_used(forged: str) -> None:
    """The attacker knows all formats and every value, but not the cluster's key."""
    keyed, client = KvChecksum(b"a key"), FakeClient()
    other = bytes(reversed(PAYLOAD))

    def header(key: bytes, stored: bytes, proven: bytes) -> bytes:
        proof = proof_of(key, len(proven), keyed.of(proven), keyed)
        return pack_header(key, len(stored), checksum(stored), proof=proof)

    values = {
        "nothing": header(KEYS[0], PAYLOAD, PAYLOAD) + PAYLOAD,
        "payload": header(KEYS[0], other, PAYLOAD) + other,
        "another block's payload": pack_header(
            KEYS[0],
            len(other),
            checksum(other),
            proof=header_proof(memoryview(header(KEYS[1], other, other) + other), KEYS[1]),
        )
        + other,
        "plain checksum": pack_header(KEYS[0], len(other), checksum(other)) + other,
    }

    async def call(kind: str, *, keys: list[str], at: list[int], sizes: list[int], **_: Any) -> Any:
        assert verify_value(memoryview(values[forged]), KEYS[0]), "the agent finds no damage"
        client.memory.view(at[0], sizes[0])[:] = values[forged]
        return {"outcome": sizes, "failovers": 0}

    client.call = call  # type: ignore[method-assign]
    used: Any = client
    promoter = PoolPromoter(DramTier(1 << 20, checksum=keyed), used)
    promotion = promoter.promote({KEYS[0]: VALUE_BYTES})
    await promotion.wait(timeout_s=30)
    block = promotion.pop(KEYS[0])
    promotion.close()
    assert (block is not None) == (forged == "nothing") and promoter.corrupt_blocks == (forged != "nothing")
    assert block is None or block.value == keyed.of(PAYLOAD)
    client.memory.close()

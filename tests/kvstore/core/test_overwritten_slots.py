"""Slots are registered memory: a write into one of them is found, and no tier gives it a fresh checksum."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.common.checksum import KvChecksum, checksum, memory_at
from libs.common.transport.registered_memory import PageAlignedMemory
from services.kvstore.disk.tier import DiskTier
from services.kvstore.operations import Operations
from slipstream.errors import DataCorrupt
from tests.kvstore.store_rig import BLOCK_BYTES, Rig, key, payload

KEYED, CHANGED = KvChecksum(b"a key of this cluster"), KvChecksum(b"a key of another one")


async def test_a_write_between_commit_and_disk_write_is_found_by_each_reader(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_back = rig.store.write_back

    def overwrite_first(keys: list[bytes]) -> None:
        for each in keys:
            block = rig.dram.get(each)
            assert block is not None
            memory_at(rig.dram.address_of(block.slot), 1)[0] ^= 1
        write_back(keys)

    monkeypatch.setattr(rig.store, "write_back", overwrite_first)
    assert await rig.put([1]) == [1]
    block = rig.dram.get(key(1))
    assert block is not None and block.value == checksum(payload(1))  # what readers of the slot compare with
    assert rig.store.write_behind is not None and await rig.store.write_behind.flush(timeout_s=60)
    landing = PageAlignedMemory(BLOCK_BYTES)
    (found,) = await rig.disk.read_many([(key(1), landing.address)])
    assert isinstance(found, DataCorrupt)
    progress = [each async for each, _ in Operations(rig.store).verify([key(1)])]
    assert progress[-1].corrupt == [key(1)] and rig.dram.get(key(1)) is None


@pytest.mark.parametrize("n_bytes", [100, 4096, 600_000])
async def test_a_disk_verifies_with_the_clusters_key_and_refuses_another_ones_blocks(
    tmp_path: Path, n_bytes: int
) -> None:
    data = bytes(number % 251 for number in range(n_bytes))
    memory = PageAlignedMemory(1 << 20)
    memory.view(0, n_bytes)[:] = data

    def opened(function: KvChecksum) -> DiskTier:
        tier = DiskTier(tmp_path / "kv", disk_bytes=16 << 20, checksum=function)
        tier.open()
        return tier

    digest = KEYED.of(data)
    tier = opened(KEYED)
    assert await tier.write(key(1), memory.address, n_bytes, digest)
    assert await tier.read_many([(key(1), memory.address)]) == [(n_bytes, digest)]
    tier.close()
    tier = opened(KEYED)  # blocks stay over a restart
    block = tier.table.get(key(1))
    assert block is not None and tier.files.verify(block)
    assert await tier.read_many([(key(1), memory.address)]) == [(n_bytes, digest)]
    tier.close()
    tier = opened(CHANGED)
    (found,) = await tier.read_many([(key(1), memory.address)])
    assert isinstance(found, DataCorrupt) and tier.corrupt_blocks == 1
    tier.close()

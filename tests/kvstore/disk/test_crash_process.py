"""SIGKILL of a busy kvstore process: a restart finds all durable blocks."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import grpc
import pytest

from slipstream.block_hashes import unpack_hashes
from tests.kvstore.node import BLOCK_BYTES, Client, KvstoreProcess, key, payload
from tests.kvstore.service.test_service import reconnect

BATCH = 8
KILLS = 3


async def put_durable(client: Client, numbers: list[int]) -> list[bytes]:
    """Reserve and commit; return the hashes that the answer reports as durable."""
    reserved = await client.reserve(numbers)
    if not reserved.reservation_id:
        return []
    wanted = set(unpack_hashes(reserved.wanted))
    blocks = [client.source(i, n) for i, n in enumerate(numbers) if key(n) in wanted]
    answer = await client.commit(reserved.reservation_id, blocks, wait_durable=True)
    assert set(unpack_hashes(answer.durable)) <= set(unpack_hashes(answer.committed))
    return unpack_hashes(answer.durable)


async def test_a_commit_reports_which_blocks_are_durable(node: KvstoreProcess, client: Client) -> None:
    assert await put_durable(client, [1, 2, 3]) == [key(1), key(2), key(3)]
    node.kill()
    restarted = await reconnect(node, client)
    assert len(await restarted.fetch([1, 2, 3])) == 3
    await restarted.close()


async def test_no_block_is_durable_without_a_disk(tmp_path: Path, client: Client) -> None:
    process = KvstoreProcess(tmp_path / "none", client.transport.kind, disk_bytes=0)
    process.directory.mkdir()
    process.start()
    try:
        memory_only = Client(process.endpoint, client.transport, client.memory)
        assert await put_durable(memory_only, [1]) == []
        assert len(await memory_only.fetch([1])) == 1
        await memory_only.close()
    finally:
        process.kill()


@pytest.mark.timeout(600)
async def test_sigkill_under_load_loses_no_durable_block(node: KvstoreProcess, client: Client) -> None:
    durable: dict[bytes, int] = {}
    current = client
    number = 0
    for round_number in range(KILLS):
        reported = asyncio.Event()

        async def keep_putting(target: Client, reported: asyncio.Event) -> None:
            nonlocal number
            while True:
                batch = list(range(number, number + BATCH))
                number += BATCH
                for found in await put_durable(target, batch):
                    durable[found] = int.from_bytes(found, "little")
                if number >= BATCH * 4 * (round_number + 1):  # noqa: B023
                    reported.set()

        putting = asyncio.create_task(keep_putting(current, reported))
        async with asyncio.timeout(100):
            await reported.wait()
        node.kill()
        with pytest.raises((grpc.aio.AioRpcError, AssertionError)):
            await putting
        current = await reconnect(node, client)
        kept = list(durable.values())[-100:]  # there is room for about 350
        for held in kept:
            assert len(await current.fetch([held])) == 1, f"block {held} was durable"
        status = await current.status()
        assert status.counters["slipstream_kvstore_corrupt_blocks_total"] == 0
        assert status.ledger.blocks_leaked == 0
    assert len(durable) >= KILLS * BATCH
    assert len(payload(0)) == BLOCK_BYTES


async def test_a_node_with_several_disks_survives_the_loss_of_one(tmp_path: Path, client: Client) -> None:
    disks = [tmp_path / "d0", tmp_path / "d1"]
    arguments = [part for disk in disks for part in ("--disk", str(disk))]
    directory = tmp_path / "node"
    directory.mkdir()
    process = KvstoreProcess(directory, client.transport.kind, arguments=arguments)
    process.start()
    try:
        first = Client(process.endpoint, client.transport, client.memory)
        numbers = list(range(16))
        assert len(await put_durable(first, numbers)) == 16
        await first.close()
        process.kill()
        assert all(list(disk.glob("segment-*")) for disk in disks)
        for path in disks[0].glob("segment-*"):
            path.unlink()  # the disk was replaced
        process.start()
        second = Client(process.endpoint, client.transport, client.memory)
        found = [n for n in numbers if await second.fetch([n])]
        assert 0 < len(found) < 16
        assert len(await put_durable(second, numbers)) == 16 - len(found)
        await second.close()
    finally:
        process.kill()
    assert "fail together" in (directory / "kvstore.log").read_text()


async def test_a_process_leaks_no_descriptor_over_puts_and_evictions(
    node: KvstoreProcess, client: Client
) -> None:
    await put_durable(client, list(range(8)))
    before = len(os.listdir(f"/proc/{node.process.pid}/fd"))
    for start in range(100, 100 + 40 * BATCH, BATCH):
        await put_durable(client, list(range(start, start + BATCH)))
    after = len(os.listdir(f"/proc/{node.process.pid}/fd"))
    assert after - before <= 8  # one for each segment of the disk

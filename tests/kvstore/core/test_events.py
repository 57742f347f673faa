"""WatchBlocks of a real kvstore process: the events equal the results of Lookup."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

from libs.common.transport.base import KvTransport
from libs.common.transport.registered_memory import PageAlignedMemory
from slipstream.block_view import BlockView
from slipstream.v1 import kv_events_pb2_grpc
from slipstream.v1.common_pb2 import CacheTier
from tests.kvstore.node import BLOCK_BYTES, Client, KvstoreProcess, key

DRAM, NVME = CacheTier.CACHE_TIER_DRAM, CacheTier.CACHE_TIER_NVME


async def follow(client: Client, view: BlockView, until: Callable[[BlockView], bool]) -> None:
    """Run one WatchBlocks call from the view's position until the view fulfils the condition."""
    if view.incarnation and until(view):
        return
    call = kv_events_pb2_grpc.KvEventServiceStub(client.channel).WatchBlocks(view.resume(), timeout=60)
    async for response in call:
        view.apply(response)
        if view.incarnation and until(view):
            break
    call.cancel()


async def test_events_cover_both_tiers_and_a_new_incarnation_starts_with_a_snapshot(
    node: KvstoreProcess, client: Client
) -> None:
    view, keys = BlockView(), {key(number) for number in range(12)}
    await follow(client, view, lambda v: True)
    assert view.held == {}
    await client.put(list(range(12)))
    await follow(client, view, lambda v: v.held.get(DRAM) == keys and v.held.get(NVME) == keys)
    old = view.incarnation
    node.kill()
    node.start()
    restarted = Client(node.endpoint, client.transport, client.memory)
    await follow(restarted, view, lambda v: v.incarnation != old)
    assert view.held == {NVME: keys}
    await restarted.fetch([0, 1])
    await follow(restarted, view, lambda v: v.held.get(DRAM) == {key(0), key(1)})
    await restarted.close()


async def test_a_randomly_interrupted_watch_ends_equal_to_the_held_blocks(
    tmp_path: Path, kind: str, transport: KvTransport
) -> None:
    node = KvstoreProcess(tmp_path, kind, dram_bytes=8 << 20, disk_bytes=0)
    node.start()
    memory = PageAlignedMemory(32 * BLOCK_BYTES)
    transport.register(memory.buffer)
    client = Client(node.endpoint, transport, memory)
    view, rng, done = BlockView(), random.Random(5), asyncio.Event()
    n_stored = 0

    def reached(sequence: int) -> Callable[[BlockView], bool]:
        return lambda v: v.sequence >= sequence or done.is_set()

    async def watch() -> None:
        while not done.is_set():
            await follow(client, view, reached(view.sequence + rng.randrange(1, 5)))

    watching = asyncio.create_task(watch())
    try:
        for start in range(0, 160, 8):
            for _ in range(3):  # what is wanted again takes the place of older blocks
                await client.lookup(list(range(start, start + 8)))
            n_stored += await client.put(list(range(start, start + 8)))
        assert n_stored > 16  # more than the memory holds
        done.set()
        await client.lookup([1000])
        await client.put([1000])  # wakes a watch that waits
        await asyncio.wait_for(watching, 60)
        held = {key(number) for number in [*range(160), 1000] if await client.lookup([number])}
        assert 8 < len(held) < 160
        await follow(client, view, lambda v: v.held == {DRAM: held})
    finally:
        watching.cancel()
        await client.close()
        assert node.terminate() == 0

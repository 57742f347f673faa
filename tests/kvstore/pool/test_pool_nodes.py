"""Nodes that share a pool find each other's blocks; faults of the pool fail no call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from libs.common.cluster.worker_service import held
from libs.common.transport.open import open_transport
from libs.common.transport.registered_memory import PageAlignedMemory
from services.router.prefix_index.index import PrefixIndex
from slipstream.block_hashes import pack_hashes
from slipstream.v1 import kv_events_pb2_grpc, kvstore_pb2
from slipstream.v1.common_pb2 import CacheTier
from tests.kvstore.node import BLOCK_BYTES, FINGERPRINT, Client, KvstoreProcess, key
from tests.support.network.otlp_collector import CollectedSpan, OtlpCollector
from tests.support.processes.pool_process import PoolMaster
from tests.support.processes.process_checks import all_gone, eventually
from tests.support.recorded_spans import PARENT

DRAM, POOL = CacheTier.CACHE_TIER_DRAM, CacheTier.CACHE_TIER_POOL
UNAVAILABLE = "slipstream_kvstore_pool_unavailable"
RESTARTS = "slipstream_kvstore_pool_agent_restarts_total"

# One fleet for all tests; the last one ends it.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1200)]


@contextlib.asynccontextmanager
async def watching(
    client: Client, index: PrefixIndex
) -> AsyncIterator[Callable[[Callable[[], bool]], Awaitable[None]]]:
    """Follow a node's events like a router, as "other"; yield a function that waits for a condition."""
    view = index.view("other")
    stub = kv_events_pb2_grpc.KvEventServiceStub(client.channel)

    async def follow() -> None:
        async for response in stub.WatchBlocks(view.resume()):
            view.apply(response)

    async def until(so: Callable[[], bool]) -> None:
        async with asyncio.timeout(200):
            while not so():
                assert not following.done(), following
                await asyncio.sleep(0.02)

    following = asyncio.create_task(follow())
    try:
        yield until
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


class Fleet:
    def __init__(
        self,
        master: PoolMaster,
        nodes: list[KvstoreProcess],
        clients: list[Client],
        collector: OtlpCollector,
    ) -> None:
        self.master, self.nodes, self.clients, self.collector = master, nodes, clients, collector

    async def until_unavailable(self, client: Client, *, unavailable: bool) -> None:
        await client.wait_status(lambda s: (s.counters[UNAVAILABLE] > 0) == unavailable, timeout_s=200)

    async def until_pooled(self, client: Client, numbers: list[int]) -> None:
        """Wait until a node finds blocks that another one put."""
        async with asyncio.timeout(200):
            while await client.lookup(numbers) != [POOL] * len(numbers):
                await asyncio.sleep(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    transport = open_transport("socket")
    master = PoolMaster(tmp_path_factory.mktemp("master"))
    master.start()
    collector = OtlpCollector()
    nodes, clients = [], []
    for number in range(2):
        arguments = ["--instance", f"kv-{number}", "--pool", "mooncake", "--pool-master", master.address]
        arguments += ["--pool-admin", master.admin]
        node = KvstoreProcess(
            tmp_path_factory.mktemp("node"),
            transport.kind,
            disk_bytes=0,  # no disks, only memory and the pool
            arguments=[*arguments, "--pool-bytes", str(64 << 20)],
            environment=collector.environment,
        )
        node.start()
        memory = PageAlignedMemory(16 * BLOCK_BYTES)
        transport.register(memory.buffer)
        nodes.append(node)
        clients.append(Client(node.endpoint, transport, memory))
    fleet = Fleet(master, nodes, clients, collector)
    try:
        with collector:
            for client in clients:
                await fleet.until_unavailable(client, unavailable=False)
            yield fleet
    finally:
        for client in clients:
            await client.close()
        for node in nodes:
            if node.process.poll() is None:
                node.kill()
        master.kill()
        await transport.close()


async def test_a_killed_agent_is_restarted(fleet: Fleet) -> None:
    one, other = fleet.clients
    (agent,) = children(fleet.nodes[0].process.pid)
    os.kill(agent, signal.SIGKILL)
    assert await one.put([10]) == 1
    assert await one.fetch([10]) == [DRAM]
    await one.wait_status(lambda s: s.counters[RESTARTS] == 1)
    await fleet.until_unavailable(one, unavailable=False)
    await fleet.until_pooled(other, [10])


async def test_calls_succeed_while_the_master_is_stopped_or_dead(fleet: Fleet) -> None:
    one, other = fleet.clients
    assert await one.put([20, 21]) == 2
    await fleet.until_pooled(other, [20, 21])
    fleet.master.suspend()
    try:
        assert await asyncio.wait_for(other.lookup([20, 21]), 60) == []
        await fleet.until_unavailable(other, unavailable=True)
        assert await other.put([22]) == 1  # the node still takes puts
        assert await other.fetch([22, 20]) == [DRAM]
    finally:
        fleet.master.resume()
    for client in fleet.clients:
        await fleet.until_unavailable(client, unavailable=False)

    fleet.master.kill()
    assert await asyncio.wait_for(other.lookup([20, 21]), 60) == []
    await fleet.until_unavailable(other, unavailable=True)
    assert await other.fetch([22]) == [DRAM]
    fleet.master.start()  # it lost its values; the nodes put theirs again
    await fleet.until_unavailable(other, unavailable=False)
    await fleet.until_pooled(other, [20, 21])
    assert await other.fetch([20, 21]) == [POOL, POOL]
    for client in fleet.clients:
        await client.wait_status(lambda s: not held(s.ledger))


async def test_events_of_every_node_report_the_whole_pool(fleet: Fleet) -> None:
    """Every node's events report the whole pool; the death of the master removes all of it."""
    one, other = fleet.clients
    chain = [key(number) for number in range(40, 44)]
    index = PrefixIndex()
    async with watching(other, index) as until:
        assert await one.put(range(40, 44)) == 4
        await until(lambda: index.prefix_blocks("other", chain, now_s=0, tier=POOL) == 4)
        assert index.prefix_blocks("other", chain, now_s=0, tier=DRAM) == 0
        assert index.prefix_blocks("other", chain, now_s=0) == 4  # so the router asks it for them
        assert await other.fetch(range(40, 44)) == [POOL] * 4
        await until(lambda: index.prefix_blocks("other", chain, now_s=0, tier=DRAM) == 4)

        # Another client removes them: the next list shows it without a lookup.
        await one.kvstore.DropBlocks(kvstore_pb2.DropBlocksRequest(block_hashes=key(43)), timeout=60)
        await until(lambda: index.prefix_blocks("other", chain, now_s=0, tier=POOL) == 3)

        fleet.master.kill()
        await until(lambda: index.prefix_blocks("other", chain, now_s=0, tier=POOL) == 0)
        fleet.master.start()  # the nodes put their blocks again
        await until(lambda: index.prefix_blocks("other", chain[:3], now_s=0, tier=POOL) == 3)
    late = PrefixIndex()  # a new router gets them in a snapshot
    async with watching(other, late) as until:
        await until(lambda: late.prefix_blocks("other", chain[:3], now_s=0, tier=POOL) == 3)
    status = await other.status()
    assert status.counters["slipstream_kvstore_inventory_blocks_pool"] >= 3


async def test_the_pool_loads_of_a_pin_are_in_its_trace(fleet: Fleet) -> None:
    one, other = fleet.clients
    numbers = [60, 61, 62]
    assert await one.put(numbers) == 3
    await fleet.until_pooled(other, numbers)
    pin = kvstore_pb2.PinRequest(
        fingerprint=FINGERPRINT,
        block_hashes=pack_hashes([key(number) for number in [*numbers, 63]]),
        owner="r",
        trace={"traceparent": PARENT},
    )
    pinned = await other.pins.pin(pin)
    await other.read(pinned, numbers)
    await other.release(pinned.lease_id)

    def spans() -> dict[str, CollectedSpan]:
        return {span.name: span for span in fleet.collector.of("a" * 32)}

    await eventually(lambda: len(spans()) == 3)
    above, find, load = (spans()[name] for name in ("pin", "find", "load"))
    assert above.parent == "b" * 16 and find.parent == load.parent == above.id
    assert {span.service for span in (above, find, load)} == {"slipstream-kvstore"}
    n_bytes = 3 * BLOCK_BYTES
    assert above.attributes == {"wanted_blocks": 4, "blocks": 3, "bytes": n_bytes, "tiers": "pool"}
    assert find.attributes == {"wanted_blocks": 4, "blocks": 3}
    assert load.attributes == {"tier": "pool", "wanted_blocks": 3, "blocks": 3, "bytes": n_bytes}


async def test_a_node_finds_what_another_node_put(fleet: Fleet) -> None:
    one, other = fleet.clients
    before = (await other.status()).counters
    assert await one.put([0, 1, 2, 3]) == 4
    await fleet.until_pooled(other, [0, 1, 2, 3])
    assert await other.put([4]) == 1  # continues a prefix that only the pool has
    assert await other.lookup([0, 1, 2, 3, 4, 5]) == [POOL] * 4 + [DRAM]
    assert await other.fetch([0, 1, 2, 3, 4, 5]) == [POOL] * 4 + [DRAM]
    assert await other.lookup([0, 1, 2, 3]) == [DRAM] * 4  # promoted
    counters = (await other.wait_status(lambda s: not held(s.ledger))).counters
    for metric, more in (
        ("slipstream_kvstore_hits_pool_total", 4),
        ("slipstream_kvstore_hit_bytes_pool_total", 4 * BLOCK_BYTES),
        ('slipstream_kvstore_pin_seconds_count{tier="pool"}', 1),
    ):
        assert counters[metric] - before.get(metric, 0) == more
    assert counters["slipstream_kv_blocks_leaked"] == 0

    # A drop on one node removes it from the pool, but not from another node's memory.
    await one.kvstore.DropBlocks(kvstore_pb2.DropBlocksRequest(block_hashes=key(0)), timeout=60)
    assert await one.lookup([0]) == []
    assert await other.lookup([0]) == [DRAM]

    agents = [pid for node in fleet.nodes for pid in children(node.process.pid)]
    assert len(agents) == 2
    fleet.nodes[0].kill()  # the kernel kills its agent too
    assert fleet.nodes[1].terminate() == 0
    await all_gone(agents)


def children(pid: int) -> list[int]:
    """Return the pids of a process's children."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]

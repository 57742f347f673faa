"""Nodes that pool their memory: what one put, another finds, also without the first; faults of the pool
cost speed and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libs.common.registered_memory import PageAlignedMemory
from libs.common.transport.base import KvTransport
from libs.common.worker_service import held
from slipstream.v1 import kvstore_pb2
from slipstream.v1.common_pb2 import CacheTier
from tests.kvstore.node import BLOCK_BYTES, Client, KvstoreProcess, key
from tests.support.pool_process import PoolMaster
from tests.support.processes import all_gone

DRAM, POOL = CacheTier.CACHE_TIER_DRAM, CacheTier.CACHE_TIER_POOL
AWAY = "slipstream_kvstore_pool_away"
PUTS = "slipstream_kvstore_pool_puts_total"


class Fleet:
    def __init__(self, master: PoolMaster, nodes: list[KvstoreProcess], clients: list[Client]) -> None:
        self.master, self.nodes, self.clients = master, nodes, clients

    async def until_away(self, client: Client, *, away: bool) -> None:
        await client.wait_status(lambda s: (s.counters[AWAY] > 0) == away, timeout_s=60)

    async def pooled(self, client: Client, total: int) -> None:
        await client.wait_status(lambda s: s.counters[PUTS] >= total, timeout_s=30)


@pytest.fixture
async def fleet(tmp_path: Path, transport: KvTransport) -> AsyncIterator[Fleet]:
    master = PoolMaster(tmp_path)
    master.start()
    nodes, clients = [], []
    for number in range(2):
        directory = tmp_path / f"node-{number}"
        directory.mkdir()
        arguments = ["--instance", f"kv-{number}", "--pool", "mooncake", "--pool-master", master.address]
        # No disk: the pool works alone behind the memory.
        node = KvstoreProcess(
            directory, transport.kind, disk_bytes=0, arguments=[*arguments, "--pool-bytes", str(64 << 20)]
        )
        node.start()
        memory = PageAlignedMemory(16 * BLOCK_BYTES)
        transport.register(memory.buffer)
        nodes.append(node)
        clients.append(Client(node.endpoint, transport, memory))
    fleet = Fleet(master, nodes, clients)
    try:
        for client in clients:
            await fleet.until_away(client, away=False)
        yield fleet
    finally:
        for client in clients:
            await client.close()
        for node in nodes:
            if node.process.poll() is None:
                node.kill()
        master.kill()


async def test_what_one_node_put_another_finds(fleet: Fleet) -> None:
    one, other = fleet.clients
    assert await one.put([0, 1, 2, 3]) == 4
    await fleet.pooled(one, 4)
    assert await other.put([4]) == 1  # beyond the prefix that only the pool has
    assert await other.lookup([0, 1, 2, 3, 4, 5]) == [POOL] * 4 + [DRAM]
    assert await other.fetch([0, 1, 2, 3, 4, 5]) == [POOL] * 4 + [DRAM]
    assert await other.lookup([0, 1, 2, 3]) == [DRAM] * 4  # promoted
    status = await other.wait_status(lambda s: not held(s.ledger))
    assert status.counters["slipstream_kvstore_hits_pool_total"] == 4
    assert status.counters["slipstream_kvstore_hit_bytes_pool_total"] == 4 * BLOCK_BYTES
    assert status.counters["slipstream_kvstore_pins_pool_total"] == 1
    assert status.counters["slipstream_kv_blocks_orphaned"] == 0

    # Dropped on one node, it is gone from the pool, and stays where another node holds it in memory.
    await one.kvstore.DropBlocks(kvstore_pb2.DropBlocksRequest(block_hashes=key(0)), timeout=20)
    assert await one.lookup([0]) == []
    assert await other.lookup([0]) == [DRAM]

    agents = [pid for node in fleet.nodes for pid in children(node.process.pid)]
    assert len(agents) == 2
    fleet.nodes[0].kill()  # the kernel takes its agent with it
    assert fleet.nodes[1].terminate() == 0
    await all_gone(agents)


async def test_a_master_that_stops_or_dies_costs_no_answer(fleet: Fleet) -> None:
    one, other = fleet.clients
    assert await one.put([0, 1]) == 2
    await fleet.pooled(one, 2)
    fleet.master.signal(signal.SIGSTOP)
    assert await asyncio.wait_for(other.lookup([0, 1]), 10) == []
    await fleet.until_away(other, away=True)
    assert await other.put([2]) == 1  # service goes on
    assert await other.fetch([2, 0]) == [DRAM]
    fleet.master.signal(signal.SIGCONT)
    await fleet.until_away(other, away=False)
    await fleet.until_away(one, away=False)

    fleet.master.kill()
    assert await asyncio.wait_for(other.lookup([0, 1]), 10) == []
    await fleet.until_away(other, away=True)
    assert await other.fetch([2]) == [DRAM]
    fleet.master.start()  # it has forgotten everything; the nodes put what they hold anew
    for client in fleet.clients:
        await fleet.until_away(client, away=False)
    async with asyncio.timeout(60):
        while await other.lookup([0, 1]) != [POOL, POOL]:
            await asyncio.sleep(0.1)
    assert await other.fetch([0, 1]) == [POOL, POOL]
    for client in fleet.clients:
        await client.wait_status(lambda s: not held(s.ledger))


async def test_an_agent_that_is_killed_comes_back(fleet: Fleet) -> None:
    one, other = fleet.clients
    (agent,) = children(fleet.nodes[0].process.pid)
    os.kill(agent, signal.SIGKILL)
    assert await one.put([0]) == 1
    assert await one.fetch([0]) == [DRAM]
    await one.wait_status(lambda s: s.counters["slipstream_kvstore_pool_agent_restarts_total"] == 1)
    await fleet.until_away(one, away=False)
    await fleet.pooled(one, 1)
    async with asyncio.timeout(30):
        while await other.fetch([0]) != [POOL]:
            await asyncio.sleep(0.1)


def children(pid: int) -> list[int]:
    """Pids of the processes that a process started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]

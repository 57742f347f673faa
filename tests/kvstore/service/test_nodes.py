"""Several nodes: a chain belongs to one of them, and a node that lost its lease is fenced."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from libs.common.cluster.address_book import session_digest
from libs.common.cluster.discovery import EtcdDiscovery
from libs.common.cluster.worker_record import WORKERS_PREFIX, Role, Worker
from libs.common.cluster.worker_service import held, new_incarnation
from libs.common.etcd.client import EtcdClient
from libs.common.transport.base import KvTransport
from libs.common.transport.registered_memory import PageAlignedMemory
from services.kvstore.core.puts import Fenced
from slipstream.errors import FailedPrecondition, Unavailable
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import kvstore_pb2
from tests.kvstore.node import BLOCK_BYTES, Client, KvstoreProcess
from tests.kvstore.store_rig import BLOCK_BYTES as RIG_BLOCK_BYTES
from tests.kvstore.store_rig import Rig, keys
from tests.support.processes.etcd_process import EtcdProcess
from tests.support.processes.process_checks import suspend


class Pair:
    """Two nodes of one fleet, a worker that uses both, and a router's placement record."""

    def __init__(self, nodes: list[KvstoreProcess], clients: list[Client], etcd: EtcdClient) -> None:
        self.nodes, self.clients, self.etcd = nodes, clients, etcd

    async def in_fleet(self, instance: str, *, expected: bool) -> None:
        async with asyncio.timeout(60):
            while True:
                there = (await self.etcd.get_prefix(WORKERS_PREFIX)).entries
                if any(name.endswith(f"/{instance}") for name in there) == expected:
                    return
                await asyncio.sleep(0.05)

    async def reserves(self, client: Client, numbers: list[int]) -> kvstore_pb2.ReserveResponse:
        """Reserve as soon as the node is in the fleet: a slow machine may lose a lease, and gets the next."""
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    return await client.reserve(numbers)
                await asyncio.sleep(0.05)

    async def takes_blocks(self, client: Client, numbers: list[int]) -> None:
        """Put the blocks as soon as the node is in the fleet again."""
        async with asyncio.timeout(60):
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    assert await client.put(numbers) == len(numbers)
                    return
                await asyncio.sleep(0.05)


def worker_of(transport: KvTransport) -> Worker:
    """The record of the worker: nodes pull blocks from announced sessions only."""
    digest = session_digest(transport.session_id)
    return Worker(Role.DECODE, "w", "127.0.0.1:1", new_incarnation(), session_digest=digest)


@pytest.fixture
async def pair(tmp_path: Path, transport: KvTransport) -> AsyncIterator[Pair]:
    with EtcdProcess(tmp_path / "etcd") as etcd:
        nodes, clients = [], []
        for number in range(2):
            directory = tmp_path / f"node-{number}"
            directory.mkdir()
            arguments = ["--instance", f"kv-{number}", "--etcd", etcd.endpoint, "--etcd-lease-s", "2"]
            node = KvstoreProcess(directory, transport.kind, arguments=arguments)
            node.start()
            memory = PageAlignedMemory(16 * BLOCK_BYTES)
            transport.register(memory.buffer)
            nodes.append(node)
            clients.append(Client(node.endpoint, transport, memory))
        client = EtcdClient([etcd.endpoint], timeout_s=60)
        discovery = EtcdDiscovery(client)
        discovery.announce(worker_of(transport))
        try:
            await discovery.wait_announced(timeout_s=60)
            yield Pair(nodes, clients, client)
        finally:
            for each in clients:
                await each.close()
            await discovery.close()
            await client.close()
            for node in nodes:
                if node.process.poll() is None:
                    node.kill()


async def test_a_node_stopped_beyond_its_lease_refuses_earlier_reservations(pair: Pair) -> None:
    (away, other), (node, _) = pair.clients, pair.nodes
    await pair.takes_blocks(away, [0, 1])
    reserved = await pair.reserves(away, [2, 3])
    suspend(node.process)
    await pair.in_fleet("kv-0", expected=False)
    # Meanwhile the chain continues on another node.
    await pair.takes_blocks(other, [0, 1, 2, 3])
    os.kill(node.process.pid, signal.SIGCONT)
    refusal: Exception = Unavailable("")
    async with asyncio.timeout(60):
        while isinstance(refusal, Unavailable):  # the connection may end with the stop
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await away.commit(reserved.reservation_id, [away.source(0, 2), away.source(1, 3)])
            refusal = from_rpc_error(caught.value)
    assert isinstance(refusal, FailedPrecondition)
    assert len(await away.lookup([0, 1, 2, 3])) == 2  # it still serves its blocks
    # Back in the fleet, the node accepts blocks.
    await pair.in_fleet("kv-0", expected=True)
    await pair.takes_blocks(away, [2, 3])
    status = await away.wait_status(lambda s: not held(s.ledger))
    assert status.counters["slipstream_kv_blocks_leaked"] == 0


async def test_only_the_blocks_of_a_killed_node_are_misses(pair: Pair) -> None:
    lost, other = pair.clients
    await pair.takes_blocks(lost, [0, 1])
    await pair.takes_blocks(other, [10, 11])
    pinned = await other.pin([10, 11])
    pair.nodes[0].kill()
    await other.read(pinned, [10, 11])
    await other.release(pinned.lease_id)
    assert await other.lookup([0, 1]) == []  # a miss
    await pair.takes_blocks(other, [0, 1])
    await pair.in_fleet("kv-0", expected=False)
    await other.wait_status(lambda s: not held(s.ledger))


async def test_the_term_is_checked_before_and_after_the_pull(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    now: list[int | None] = [7]
    rig.puts._term = lambda: now[0]
    lease = rig.puts.reserve(keys(1, 2), RIG_BLOCK_BYTES, owner="w")
    assert lease is not None
    rig.transport.gate = asyncio.Event()
    commit = asyncio.create_task(rig.puts.commit(lease.lease_id, "s", rig.sources([1, 2]), timeout_s=5))
    while not rig.puts.reserved_blocks or lease.resource.slots:
        await asyncio.sleep(0)
    now[0] = None  # lost during the pull
    rig.transport.gate.set()
    with pytest.raises(Fenced):
        await commit
    with pytest.raises(Fenced):
        rig.puts.reserve(keys(3), RIG_BLOCK_BYTES, owner="w")
    now[0] = 8
    late = rig.puts.reserve(keys(1), RIG_BLOCK_BYTES, owner="w")
    assert late is not None
    now[0] = 9  # lost and regained before the commit
    with pytest.raises(Fenced):
        await rig.puts.commit(late.lease_id, "s", rig.sources([1]), timeout_s=5)
    assert not any(rig.store.contains(block) for block in keys(1, 2, 3))
    assert rig.at_rest()
    rig.disk.close()

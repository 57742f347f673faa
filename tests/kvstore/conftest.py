"""A kvstore process, a worker's side of it, and a calm one of each for the tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from libs.common.cluster.worker_service import held
from libs.common.transport.base import KvTransport
from libs.common.transport.open import open_transport
from libs.common.transport.registered_memory import PageAlignedMemory
from services.kvstore.core.store import BlockStore
from tests.common.transport.peers import settle_slowly
from tests.kvstore.node import BLOCK_BYTES, Client, KvstoreProcess
from tests.kvstore.store_rig import Rig
from tests.support.defaults import set_default
from tests.support.lasting import lasting_dir
from tests.support.pool_process import PoolMaster

# Their subject is what happens when a disk hangs: there the limits are the store's own.
OF_HANGING_DISKS = ("test_disk_faults", "test_disk_slow", "test_disk_start")


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """A slow machine is no disk that hangs."""
    if request.module.__name__.rpartition(".")[2] not in OF_HANGING_DISKS:
        for name in ("health.READ_HANGS_AFTER_S", "health.WRITE_HANGS_AFTER_S", "watch.READ_HANGS_AFTER_S"):
            monkeypatch.setattr(f"services.kvstore.disk.{name}", 60.0)
        set_default(monkeypatch, BlockStore.pin, "disk_wait_s", 60.0)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """The socket transport, unless a test is about what differs between the two."""
    return str(getattr(request, "param", "socket"))


@pytest.fixture
async def transport(kind: str) -> AsyncIterator[KvTransport]:
    opened = open_transport(kind)
    settle_slowly(opened)
    yield opened
    await opened.close()


@pytest.fixture
def node(kind: str, tmp_path: Path) -> Iterator[KvstoreProcess]:
    process = KvstoreProcess(tmp_path, kind)
    process.start()
    yield process
    if process.process.poll() is None:
        process.kill()


@pytest.fixture
async def client(node: KvstoreProcess, transport: KvTransport) -> AsyncIterator[Client]:
    memory = PageAlignedMemory(64 * BLOCK_BYTES)
    transport.register(memory.buffer)
    made = Client(node.endpoint, transport, memory)
    yield made
    await made.close()
    if node.process.poll() is None:
        last = Client(node.endpoint, transport, memory)  # the node may have been restarted
        status = await last.wait_status(lambda s: not held(s.ledger))
        assert status.counters["slipstream_kv_blocks_orphaned"] == 0
        assert status.load.blocks_held == 0
        await last.close()


@pytest.fixture(scope="module")
def calm_node(request: pytest.FixtureRequest) -> Iterator[KvstoreProcess]:
    """One process for the tests that do not harm it; each uses blocks of its own."""
    with lasting_dir(request, "calm") as directory:
        process = KvstoreProcess(directory, "socket")
        process.start()
        yield process
        assert process.terminate() == 0


@pytest.fixture
async def calm(calm_node: KvstoreProcess) -> AsyncIterator[Client]:
    transport = open_transport("socket")
    memory = PageAlignedMemory(16 * BLOCK_BYTES)
    transport.register(memory.buffer)
    made = Client(calm_node.endpoint, transport, memory)
    yield made
    await made.wait_status(lambda s: not held(s.ledger))
    await made.close()
    await transport.close()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    made.store.start()
    yield made
    made.io.gate.set()
    await made.store.close(flush_timeout_s=60)
    assert made.at_rest()
    assert made.dram.table.n_evictable == made.dram.table.n_blocks
    made.disk.close()


@pytest.fixture(scope="module")
def master(request: pytest.FixtureRequest) -> Iterator[PoolMaster]:
    """Of the tests of a module: a real one, for pools without etcd."""
    with lasting_dir(request, "master") as directory:
        one = PoolMaster(directory, client_ttl_s=5)
        one.start()
        yield one
        one.kill()

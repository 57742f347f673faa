"""Fixtures: a kvstore process, a worker's client of it, and a shared one of each per module."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from libs.common.cluster.worker_service import held
from libs.common.transport.base import KvTransport
from libs.common.transport.open import open_transport
from libs.common.transport.registered_memory import PageAlignedMemory
from services.kvstore.core.store import BlockStore
from tests.common.transport.peers import stop_slowly
from tests.kvstore.node import BLOCK_BYTES, Client, KvstoreProcess
from tests.kvstore.store_rig import Rig
from tests.support.defaults import set_default
from tests.support.fixture_dirs import lasting_dir
from tests.support.processes.pool_process import PoolMaster

# These tests are about hanging disks and keep the store's own limits.
OF_HANGING_DISKS = ("test_disk_faults", "test_disk_slow", "test_disk_start")


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Lengthen the limits, so that a slow machine does not count as a hanging disk."""
    if request.module.__name__.rpartition(".")[2] not in OF_HANGING_DISKS:
        for name in ("health.READ_HANGS_AFTER_S", "health.WRITE_HANGS_AFTER_S", "watch.READ_HANGS_AFTER_S"):
            monkeypatch.setattr(f"services.kvstore.disk.{name}", 60.0)
        set_default(monkeypatch, BlockStore.pin, "disk_wait_s", 60.0)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """The socket transport, unless a test compares the transports."""
    return str(getattr(request, "param", "socket"))


@pytest.fixture
async def transport(kind: str) -> AsyncIterator[KvTransport]:
    opened = open_transport(kind)
    stop_slowly(opened)
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
        assert status.counters["slipstream_kv_blocks_leaked"] == 0
        assert status.load.blocks_held == 0
        await last.close()


@pytest.fixture(scope="module")
def shared_node(request: pytest.FixtureRequest) -> Iterator[KvstoreProcess]:
    """One process for all tests that do not disturb it; each test uses separate blocks."""
    with lasting_dir(request, "calm") as directory:
        process = KvstoreProcess(directory, "socket")
        process.start()
        yield process
        assert process.terminate() == 0


@pytest.fixture
async def shared_client(shared_node: KvstoreProcess) -> AsyncIterator[Client]:
    transport = open_transport("socket")
    memory = PageAlignedMemory(16 * BLOCK_BYTES)
    transport.register(memory.buffer)
    made = Client(shared_node.endpoint, transport, memory)
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
    """A pool master process for one module, for pools without etcd."""
    with lasting_dir(request, "master") as directory:
        one = PoolMaster(directory, client_ttl_s=5)
        one.start()
        yield one
        one.kill()

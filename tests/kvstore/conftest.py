"""A kvstore process, a worker's side of it, and a calm one of each for the tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from libs.common.registered_memory import PageAlignedMemory
from libs.common.transport.base import KvTransport
from libs.common.transport.open import open_transport
from libs.common.worker_service import held
from tests.kvstore.node import BLOCK_BYTES, Client, KvstoreProcess
from tests.kvstore.store_rig import Rig


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """The socket transport, unless a test is about what differs between the two."""
    return str(getattr(request, "param", "socket"))


@pytest.fixture
async def transport(kind: str) -> AsyncIterator[KvTransport]:
    opened = open_transport(kind)
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
def calm_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KvstoreProcess]:
    """One process for the tests that do not harm it; each uses blocks of its own."""
    process = KvstoreProcess(tmp_path_factory.mktemp("calm"), "socket")
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
    await made.store.close(flush_timeout_s=5)
    assert made.at_rest()
    assert made.dram.table.n_evictable == made.dram.table.n_blocks
    made.disk.close()

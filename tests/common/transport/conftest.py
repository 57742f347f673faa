"""One transport and one undisturbed peer for each kind and module; extra peers that tests may kill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from libs.common.transport import incarnation_probe as probe
from libs.common.transport.base import KvTransport
from libs.common.transport.open import open_transport
from libs.common.transport.registered_memory import PageAlignedMemory
from tests.common.transport.peers import (
    BIG_BYTES,
    MIB,
    WAIT_S,
    Peer,
    SpawnPeer,
    end_peer,
    registered,
    start_peer,
    stop_slowly,
)
from tests.support.defaults import set_default


@pytest.fixture(params=["mooncake", "socket"], scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give peers on slow machines enough time to greet."""
    set_default(monkeypatch, probe.greet, "timeout_s", WAIT_S)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transport(kind: str) -> AsyncIterator[KvTransport]:
    """One transport for all tests of a kind; it must survive each of them."""
    opened = open_transport(kind)
    stop_slowly(opened)
    yield opened
    assert opened.reads_in_flight == 0
    await opened.close()


@pytest.fixture
def spawn_peer(kind: str) -> Iterator[SpawnPeer]:
    """Start peers that the test may stop or kill."""
    peers: list[Peer] = []

    def spawn(n_bytes: int = 4 * MIB, seed: int = 1) -> Peer:
        peers.append(start_peer(kind, n_bytes, seed))
        return peers[-1]

    yield spawn
    for peer in peers:
        end_peer(peer)


@pytest.fixture(scope="module")
def shared_peer(kind: str) -> Iterator[Peer]:
    """A peer of BIG_BYTES with seed 1 that no test disturbs."""
    peer = start_peer(kind, BIG_BYTES, 1)
    yield peer
    assert peer.process.poll() is None
    end_peer(peer)


@pytest.fixture(scope="module")
def big_memory(transport: KvTransport) -> PageAlignedMemory:
    """A destination for a read long enough to be disturbed. Each test zeroes it."""
    return registered(transport, BIG_BYTES)

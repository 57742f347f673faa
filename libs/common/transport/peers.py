"""The base of both transports: it caches its peers and supervises its reads."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from libs.common.transport.base import Landed, ProcessGuard, ReadOp, Region, RegionTable
from libs.common.transport.reads import ReadSupervisor
from libs.common.transport.tensor_memory import Tensor

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The bound of the peer cache. The next read from an evicted peer greets it again.
MAX_PEERS = 256


class Peer(Protocol):
    """One incarnation of another process."""

    slots: asyncio.Semaphore  # for reads at once


PeerT = TypeVar("PeerT", bound=Peer)


class PeerTransport(ABC, Generic[PeerT]):
    """Implements KvTransport except for `session_id` and `close`."""

    kind: str

    def __init__(self, *, stop_timeout_s: float) -> None:
        """`stop_timeout_s`: how long a stopped read may take to end before its destination is quarantined."""
        self._guard = ProcessGuard(self.kind)
        self._regions = RegionTable()
        self._destinations = RegionTable()  # of reads; the regions, and memory that peers cannot reach
        self._reads = ReadSupervisor(stop_timeout_s=stop_timeout_s)
        self._peers: dict[str, PeerT] = {}

    @property
    def reads_in_flight(self) -> int:
        return self._reads.in_flight

    @property
    def quarantined_bytes(self) -> int:
        return self._reads.quarantined_bytes

    def quarantined(self, address: int, n_bytes: int) -> bool:
        return self._reads.quarantined(address, n_bytes)

    def register(self, buffer: Buffer | Tensor | Region) -> Region:
        self._guard.check()
        region = self._regions.add(buffer, accept=self._register)
        self._destinations.add(buffer)
        return region

    def add_destination(self, buffer: Buffer | Tensor | Region) -> Region:
        self._guard.check()
        return self._destinations.add(buffer, accept=self._check_destination)

    async def read(
        self, session_id: str, reads: Sequence[ReadOp], *, timeout_s: float, landed: Landed | None = None
    ) -> None:
        self._guard.check()
        self._reads.check_destinations(reads, self._destinations)
        if not reads:
            return
        peer = self._peer(session_id)
        await self._reads.run(
            lambda stop: self._transfer(peer, reads, landed, stop),
            reads,
            slots=peer.slots,
            timeout_s=timeout_s,
        )

    def _peer(self, session_id: str) -> PeerT:
        """The cached peer, or a new one that replaces the oldest."""
        peer = self._peers.get(session_id)
        if peer is None:
            peer = self._peers[session_id] = self._make_peer(session_id)
            while len(self._peers) > MAX_PEERS:
                self._discard(self._peers.pop(next(iter(self._peers))))
        return peer

    @abstractmethod
    def _register(self, region: Region) -> None:
        """Register the memory with the engine that moves the bytes. Raises TransferRefused."""

    @abstractmethod
    def _check_destination(self, region: Region) -> None:
        """Raises TransferRefused for memory that the engine reads into only when it is registered."""

    @abstractmethod
    def _make_peer(self, session_id: str) -> PeerT:
        """A new peer with that session id. Raises TransferRefused for an id of another kind."""

    def _discard(self, peer: PeerT) -> None:
        """Clean up after a peer that leaves the cache; it gets no more reads."""

    @abstractmethod
    async def _transfer(
        self, peer: PeerT, reads: Sequence[ReadOp], landed: Landed | None, stop: asyncio.Event
    ) -> None:
        """Run one read, under the supervisor of reads.py. Raises TransferError."""

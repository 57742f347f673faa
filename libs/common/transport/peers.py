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

# The peer cache's bound; a peer that is evicted costs one more greeting.
MAX_PEERS = 256


class Peer(Protocol):
    """One incarnation of another process."""

    slots: asyncio.Semaphore  # for reads at once


PeerT = TypeVar("PeerT", bound=Peer)


class PeerTransport(ABC, Generic[PeerT]):
    """Implements KvTransport but for `session_id` and `close`, which ends what is made here."""

    kind: str

    def __init__(self, *, settle_s: float) -> None:
        self._guard = ProcessGuard(self.kind)
        self._regions = RegionTable()
        self._reads = ReadSupervisor(settle_s=settle_s)
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
        return self._regions.add(buffer, take=self._take)

    async def read(
        self, session_id: str, reads: Sequence[ReadOp], *, timeout_s: float, landed: Landed | None = None
    ) -> None:
        self._guard.check()
        self._reads.check_destinations(reads, self._regions)
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
            peer = self._peers[session_id] = self._meet(session_id)
            while len(self._peers) > MAX_PEERS:
                self._discard(self._peers.pop(next(iter(self._peers))))
        return peer

    @abstractmethod
    def _take(self, region: Region) -> None:
        """Register the memory with the engine that moves the bytes. Raises TransferRefused."""

    @abstractmethod
    def _meet(self, session_id: str) -> PeerT:
        """A new peer of that session id. Raises TransferRefused for an id of another kind."""

    def _discard(self, peer: PeerT) -> None:
        """Called when the peer leaves the cache: no more reads begin at it."""

    @abstractmethod
    async def _transfer(
        self, peer: PeerT, reads: Sequence[ReadOp], landed: Landed | None, stop: asyncio.Event
    ) -> None:
        """One read, under a supervisor (`reads.py`). Raises TransferError."""

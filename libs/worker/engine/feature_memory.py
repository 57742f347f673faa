"""Draft features on their way from prefill to decode workers and on to drafters, by the KV transport.

The exporting worker writes a prompt's rows into a slot. The reader reads them into a slot of the same kind,
copies them into private memory and verifies the copy: any process that reaches a Mooncake engine's port may
write to registered memory. Features change the speed only, so no one waits for a slot.
"""

from __future__ import annotations

import ctypes
import heapq
import logging
from dataclasses import dataclass

from libs.common.checksum import UNKEYED, KvChecksum
from libs.common.cluster.address_book import AddressBook
from libs.common.telemetry.counters import Counters
from libs.common.transport.base import KvTransport, ReadOp
from libs.common.transport.registered_memory import PageAlignedMemory
from libs.common.worker_bounds import MAX_PROMPT_FEATURES
from slipstream.errors import DataCorrupt, SlipstreamError, TransferError

log = logging.getLogger(__name__)

READ_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class ExportedFeatures:
    """Where a peer reads features, and the keyed checksum of what the exporter wrote there."""

    address: int
    checksum: bytes


class FeatureMemory:
    """Slots of one worker, for its exports and its reads. Event loop only.

    The kernel commits a slot when bytes first reach it.
    """

    def __init__(
        self,
        transport: KvTransport,
        *,
        slot_bytes: int,
        checksum: KvChecksum = UNKEYED,
        n_slots: int = MAX_PROMPT_FEATURES,
        exports: bool = True,
    ) -> None:
        """`slot_bytes`: the most of one prompt; 0 for a worker without features, which has no slots.

        `exports`: without them peers reach no slot, unless the transport reads into registered memory only.
        """
        self.slot_bytes = slot_bytes
        self._transport = transport
        self._checksum = checksum
        self._free: list[int] = []  # addresses; a heap, so that few slots are ever committed
        self._late: list[int] = []  # late bytes of a failed read may still reach them
        self._n_slots = n_slots if slot_bytes else 0
        if self._n_slots:
            self._memory = PageAlignedMemory(n_slots * slot_bytes)
            self._free = [self._memory.address + slot * slot_bytes for slot in range(n_slots)]
            if exports or not _is_destination(transport, self._memory):
                transport.register(self._memory.buffer)

    @property
    def held_bytes(self) -> int:
        """Bytes of the slots that are not free."""
        self._reclaim()
        return (self._n_slots - len(self._free)) * self.slot_bytes

    def export(self, packed: bytes) -> ExportedFeatures | None:
        """Write features into a slot, which the caller releases. None where they do not fit, or no slot is
        free."""
        address = self._pop_slot(len(packed))
        if address is None:
            return None
        ctypes.memmove(address, packed, len(packed))
        return ExportedFeatures(address, self._checksum.of(packed))

    def release(self, exported: ExportedFeatures) -> None:
        """Free the slot, once. A read of it that still runs then finds a wrong checksum."""
        heapq.heappush(self._free, exported.address)

    async def read(self, session_id: str, exported: ExportedFeatures, n_bytes: int) -> bytes | None:
        """Features that a peer exported. None if they do not fit or no slot is free.

        Raises TransferError, and DataCorrupt when the checksum differs.
        """
        address = self._pop_slot(n_bytes)
        if address is None:
            return None
        try:
            reads = [ReadOp(address, exported.address, n_bytes)]
            await self._transport.read(session_id, reads, timeout_s=READ_TIMEOUT_S)
            packed = ctypes.string_at(address, n_bytes)
        finally:
            self._late.append(address)
            self._reclaim()
        if self._checksum.of(packed) != exported.checksum:
            peer = session_id.partition("/")[0]  # the rest is a secret of readers
            raise DataCorrupt(f"draft features from {peer} have a wrong checksum")
        return packed

    def _pop_slot(self, n_bytes: int) -> int | None:
        self._reclaim()
        return heapq.heappop(self._free) if self._free and 0 < n_bytes <= self.slot_bytes else None

    def _reclaim(self) -> None:
        """Free the slots of ended reads, but for those that late bytes may still reach."""
        if not self._late:
            return
        late = [a for a in self._late if self._transport.quarantined(a, self.slot_bytes)]
        for address in self._late:
            if address not in late:
                heapq.heappush(self._free, address)
        self._late = late


class FeatureReader:
    """Reads of one worker, which goes on without features where they fail. Event loop only."""

    def __init__(
        self, transport: KvTransport, memory: FeatureMemory, addresses: AddressBook, counters: Counters
    ) -> None:
        self.transport = transport
        self._memory = memory
        self._addresses = addresses
        self._counters = counters

    async def read(self, session_id: str, exported: ExportedFeatures, n_bytes: int) -> bytes | None:
        """The verified bytes; None if they cannot be had, which costs drafts only."""
        try:
            await self._addresses.check_session(session_id)
            packed = await self._memory.read(session_id, exported, n_bytes)
        except SlipstreamError as error:
            if isinstance(error, DataCorrupt):
                self._counters.add("slipstream_kv_checksum_failures_total")
            log.warning("draft features are not read: %s", error.message)
            return None
        if packed is not None:
            self._counters.add("slipstream_feature_bytes_pulled_total", n_bytes)
        return packed


def _is_destination(transport: KvTransport, memory: PageAlignedMemory) -> bool:
    """Whether the transport reads into the memory although no peer reaches it."""
    try:
        transport.add_destination(memory.buffer)
    except TransferError:
        return False
    return True

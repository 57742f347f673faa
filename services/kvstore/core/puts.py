"""Two-phase puts: the store reserves slots, then pulls the bytes from the writer's memory.

The store publishes a block only after it verified the checksum, so readers see whole blocks or none.
Checksums are computed while the transport reads the next blocks.

A node whose etcd lease ended has been replaced in the fleet. It refuses commits of earlier reservations
and new reservations until it has joined again. The term shows this before and after the pull.

A slot whose pull failed is freed at once. If late bytes may still land in it, the store frees it when the
transport reports that none can.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.common.telemetry.counters import Counters
from libs.common.transport.base import KvTransport, ReadOp
from libs.common.transport.registered_memory import page_rounded
from services.kvstore.core.leases import LeaseRecord, LeaseTable
from services.kvstore.core.store import BlockStore
from services.kvstore.dram.slots import Slot
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound, Overloaded, TransferError

log = logging.getLogger(__name__)

# One commit pulls its blocks in groups, and a failure refuses only its group.
GROUP_BYTES = 32 << 20


class Fenced(FailedPrecondition):
    """The node lost its fleet membership since the reservation, or has none now."""


def constant_term() -> int:
    """The term of a node that belongs to no fleet."""
    return 1


@dataclass(slots=True)
class PutReservation:
    """Slots that wait for their bytes, by hash."""

    block_bytes: int
    slots: dict[bytes, Slot]
    term: int


@dataclass(frozen=True, slots=True)
class PutSource:
    """Address, size and checksum of a block in the writer's memory."""

    key: bytes
    address: int
    n_bytes: int
    checksum: bytes


class Puts:
    """Reservations and commits of one store. Event loop only."""

    def __init__(
        self,
        store: BlockStore,
        transport: KvTransport,
        counters: Counters,
        *,
        now_ms: Callable[[], float],
        term: Callable[[], int | None] = constant_term,
    ) -> None:
        """`term` returns the term of this node's fleet membership, None while it has none."""
        self._store = store
        self._table = store.dram.table
        self._transport = transport
        self._counters = counters
        self._now_ms = now_ms
        self._term = term
        self._leases: LeaseTable[PutReservation] = LeaseTable(lambda: secrets.token_hex(16))
        self._incoming: set[bytes] = set()
        self._quarantined: list[Slot] = []

    @property
    def reservations(self) -> int:
        """Live reservations."""
        return len(self._leases)

    @property
    def reserved_blocks(self) -> int:
        """Slots of blocks that have not arrived yet, quarantined ones included."""
        return len(self._incoming) + len(self._quarantined)

    def reserve(
        self, keys: Sequence[bytes], block_bytes: int, *, owner: str, tenant: bytes = b""
    ) -> LeaseRecord[PutReservation] | None:
        """Reserve slots for those of `keys` that are neither held nor arriving, charged to `tenant`.

        Keys are served in order while there is room. Returns None if no key needs a slot. Raises Overloaded
        if there is no room at all, and Fenced while this node is not in the fleet.
        """
        term = self._term()
        if term is None:
            raise Fenced("this node has no place in the fleet now and takes no blocks")
        if not 0 < block_bytes <= self._table.max_block_bytes:
            raise InvalidArgument("block_bytes", f"must be 1 to {self._table.max_block_bytes}")
        wanted = [
            key for key in dict.fromkeys(keys) if key not in self._incoming and not self._store.contains(key)
        ]
        slots: dict[bytes, Slot] = {}
        wanted = self._table.offer(wanted, block_bytes)
        for key in wanted:
            slot = self._table.allocate(block_bytes, tenant=tenant)
            if slot is None:
                break
            slots[key] = slot
        if wanted and not slots:
            raise Overloaded("every block in memory is in use")
        if not slots:
            return None
        self._incoming.update(slots)
        reservation = PutReservation(block_bytes, slots, term)
        return self._leases.grant(reservation, owner=owner, requested_ms=0, now_ms=self._now_ms())

    async def commit(
        self, reservation_id: str, session_id: str, sources: Sequence[PutSource], *, timeout_s: float
    ) -> tuple[list[bytes], list[bytes]]:
        """Pull and publish the blocks of a chain, in its order; returns (committed, refused) hashes.

        Raises NotFound if the reservation has ended and not all blocks are held, and Fenced if it belongs to
        an older term.
        """
        lease = self._leases.get(reservation_id, now_ms=self._now_ms())
        if lease is None:
            if sources and all(self._store.contains(source.key) for source in sources):
                return [source.key for source in sources], []
            raise NotFound("the reservation has ended", field="reservation_id")
        lease.users += 1
        committed: list[bytes] = []
        try:
            self._check_term(lease.resource)
            deadline_ms = self._now_ms() + timeout_s * 1000
            for group in _groups(sources, lease.resource):
                left_s = (deadline_ms - self._now_ms()) / 1000
                committed += await self._pull(session_id, group, lease.resource, timeout_s=max(0.0, left_s))
        finally:
            lease.users -= 1
            if not lease.resource.slots or lease.resource.term != self._term():
                self.cancel(reservation_id)
        self._table.policy(page_rounded(lease.resource.block_bytes)).chained(committed)
        committed += [s.key for s in sources if s.key not in committed and self._store.contains(s.key)]
        return committed, [source.key for source in sources if source.key not in committed]

    def cancel(self, reservation_id: str) -> None:
        """Free the unused slots of a reservation; a running commit keeps those it fills. Idempotent."""
        lease = self._leases.end(reservation_id)
        if lease is not None:
            self._release_slots(lease.resource)

    def expire(self) -> int:
        """End due reservations and free quarantined slots that are safe; returns the ended reservations."""
        due = self._leases.expire(now_ms=self._now_ms())
        for lease in due:
            self._release_slots(lease.resource)
        waiting, self._quarantined = self._quarantined, []
        for slot in waiting:
            self._free_after_quarantine(slot)
        return len(due)

    async def _pull(
        self, session_id: str, group: Sequence[PutSource], reservation: PutReservation, *, timeout_s: float
    ) -> list[bytes]:
        """Pull one group; returns the hashes of the blocks that verified and are published."""
        group = [
            source for source in group if source.key in reservation.slots
        ]  # drops those cancelled meanwhile
        if not group:
            return []
        taken = {source.key: reservation.slots.pop(source.key) for source in group}
        reads = [
            ReadOp(self._store.dram.address_of(taken[source.key]), source.address, source.n_bytes)
            for source in group
        ]
        found: dict[int, bytes] = {}

        def landed(read: ReadOp) -> None:
            found[read.local_address] = self._store.dram.checksum.at(read.local_address, read.n_bytes)

        published: list[bytes] = []
        try:
            await self._transport.read(session_id, reads, timeout_s=timeout_s, landed=landed)
            n_bytes = sum(source.n_bytes for source in group)
            self._counters.add("slipstream_kv_bytes_pulled_total", n_bytes)
            self._check_term(reservation)
            for source, read in zip(group, reads, strict=True):
                have = found[read.local_address]
                if have != source.checksum:
                    self._counters.add("slipstream_kv_checksum_failures_total")
                    log.warning("block %s of a put has a wrong checksum", source.key.hex())
                    continue
                if self._store.dram.get(source.key) is None:  # a load may have published it meanwhile
                    self._table.publish(source.key, taken.pop(source.key), source.n_bytes, have)
                    published.append(source.key)
        except TransferError as error:
            log.warning("pull of %d blocks failed: %s", len(group), error)
        finally:
            self._incoming.difference_update(source.key for source in group)
            for slot in taken.values():
                self._free_after_quarantine(slot)
        self._store.write_back(published)
        return published

    def _check_term(self, reservation: PutReservation) -> None:
        if reservation.term != self._term():
            raise Fenced("this node was unavailable since the reservation; others may have taken its place")

    def _release_slots(self, reservation: PutReservation) -> None:
        self._incoming.difference_update(reservation.slots)
        for slot in reservation.slots.values():
            self._table.free(slot)
        reservation.slots.clear()

    def _free_after_quarantine(self, slot: Slot) -> None:
        if self._transport.quarantined(self._store.dram.address_of(slot), slot.slot_bytes):
            self._quarantined.append(slot)
        else:
            self._table.free(slot)


def _groups(sources: Sequence[PutSource], reservation: PutReservation) -> list[list[PutSource]]:
    """The sources that match the reservation, each once, in groups of at most GROUP_BYTES."""
    fitting = {
        source.key: source
        for source in sources
        if source.key in reservation.slots and source.n_bytes == reservation.block_bytes
    }
    size = max(1, GROUP_BYTES // reservation.block_bytes)
    listed = list(fitting.values())
    return [listed[start : start + size] for start in range(0, len(listed), size)]

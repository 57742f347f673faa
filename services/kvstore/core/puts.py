"""Two-phase puts: slots first, then the bytes, pulled by the store from the writer's memory.

A block is published only after its checksum was verified here, so readers see whole blocks or none; that is
taken while the next blocks are on their way.
A node that was away beyond its lease in etcd has been replaced: what was reserved before is refused then,
and nothing is taken until it is in the fleet again. The term of its stay tells, before the pull and after.

A slot whose pull failed is free again at once, or, when late bytes may still land in it, as soon as
the transport says that none will.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.common.checksum import checksum_at
from libs.common.rpc.telemetry import Counters
from libs.common.transport.base import KvTransport, ReadOp
from services.kvstore.core.leases import LeaseTable, PinLeaseRecord
from services.kvstore.core.store import BlockStore
from services.kvstore.dram.slots import Slot
from slipstream.errors import FailedPrecondition, InvalidArgument, NotFound, Overloaded, TransferError

log = logging.getLogger(__name__)

# Blocks of one commit are pulled in groups: a failure refuses its group only.
GROUP_BYTES = 32 << 20


class Fenced(FailedPrecondition):
    """The node lost its place in the fleet since the reservation, or has none now."""


def one_term() -> int:
    """The term of a node that belongs to no fleet."""
    return 1


@dataclass(slots=True)
class PutReservation:
    """Slots waiting for their bytes, by hash."""

    block_bytes: int
    slots: dict[bytes, Slot]
    term: int


@dataclass(frozen=True, slots=True)
class PutSource:
    """Where the writer has a block, and what it must be."""

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
        term: Callable[[], int | None] = one_term,
    ) -> None:
        """`term`: of this node's present stay in the fleet, None while it has none."""
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
        """Slots taken for blocks that are not there yet, quarantined ones included."""
        return len(self._incoming) + len(self._quarantined)

    def reserve(
        self, keys: Sequence[bytes], block_bytes: int, *, owner: str, tenant: bytes = b""
    ) -> PinLeaseRecord[PutReservation] | None:
        """Slots for those of `keys` that are neither held nor on their way, as many as there is room for,
        from the first on. None when there are none worth putting. Raises Overloaded when there is no room,
        Fenced while this node has no place in the fleet. `tenant` is charged for them.
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
        return self._leases.grant(reservation, owner=owner, asked_ms=0, now_ms=self._now_ms())

    async def commit(
        self, reservation_id: str, session_id: str, sources: Sequence[PutSource], *, timeout_s: float
    ) -> tuple[list[bytes], list[bytes]]:
        """Pull and publish the blocks; returns the hashes (committed, refused). NotFound when the
        reservation has ended and the blocks are not all held, Fenced when it is of an older term."""
        lease = self._leases.get(reservation_id, now_ms=self._now_ms())
        if lease is None:
            if sources and all(self._store.contains(source.key) for source in sources):
                return [source.key for source in sources], []
            raise NotFound("the reservation has ended", field="reservation_id")
        lease.users += 1
        committed: list[bytes] = []
        try:
            self._check_term(lease.kept)
            give_up_at_ms = self._now_ms() + timeout_s * 1000
            for group in _groups(sources, lease.kept):
                left_s = (give_up_at_ms - self._now_ms()) / 1000
                committed += await self._pull(session_id, group, lease.kept, timeout_s=max(0.0, left_s))
        finally:
            lease.users -= 1
            if not lease.kept.slots or lease.kept.term != self._term():
                self.cancel(reservation_id)
        committed += [s.key for s in sources if s.key not in committed and self._store.contains(s.key)]
        return committed, [source.key for source in sources if source.key not in committed]

    def cancel(self, reservation_id: str) -> None:
        """Give up the rest of a reservation; what a running commit pulls is its own. Idempotent."""
        lease = self._leases.end(reservation_id)
        if lease is not None:
            self._give_back(lease.kept)

    def expire(self) -> int:
        """End the reservations that are due and free slots that became quiet; returns how many ended."""
        due = self._leases.expire(now_ms=self._now_ms())
        for lease in due:
            self._give_back(lease.kept)
        waiting, self._quarantined = self._quarantined, []
        for slot in waiting:
            self._free_when_quiet(slot)
        return len(due)

    async def _pull(
        self, session_id: str, group: Sequence[PutSource], reservation: PutReservation, *, timeout_s: float
    ) -> list[bytes]:
        """The hashes of the group's blocks that arrived whole and are published."""
        group = [source for source in group if source.key in reservation.slots]  # not cancelled meanwhile
        if not group:
            return []
        taken = {source.key: reservation.slots.pop(source.key) for source in group}
        reads = [
            ReadOp(self._store.dram.address_of(taken[source.key]), source.address, source.n_bytes)
            for source in group
        ]
        found: dict[int, bytes] = {}

        def landed(read: ReadOp) -> None:
            found[read.local_address] = checksum_at(read.local_address, read.n_bytes)

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
                self._table.publish(source.key, taken.pop(source.key), source.n_bytes, have)
                published.append(source.key)
        except TransferError as error:
            log.warning("pull of %d blocks failed: %s", len(group), error)
        finally:
            self._incoming.difference_update(source.key for source in group)
            for slot in taken.values():
                self._free_when_quiet(slot)
        self._store.write_back(published)
        return published

    def _check_term(self, reservation: PutReservation) -> None:
        if reservation.term != self._term():
            raise Fenced("this node was away since the reservation; others may have taken its place")

    def _give_back(self, reservation: PutReservation) -> None:
        self._incoming.difference_update(reservation.slots)
        for slot in reservation.slots.values():
            self._table.free(slot)
        reservation.slots.clear()

    def _free_when_quiet(self, slot: Slot) -> None:
        if self._transport.quarantined(self._store.dram.address_of(slot), slot.slot_bytes):
            self._quarantined.append(slot)
        else:
            self._table.free(slot)


def _groups(sources: Sequence[PutSource], reservation: PutReservation) -> list[list[PutSource]]:
    """The sources that fit the reservation, each once, in groups of at most GROUP_BYTES."""
    fitting = {
        source.key: source
        for source in sources
        if source.key in reservation.slots and source.n_bytes == reservation.block_bytes
    }
    size = max(1, GROUP_BYTES // reservation.block_bytes)
    listed = list(fitting.values())
    return [listed[start : start + size] for start in range(0, len(listed), size)]

"""The block store of a node: lookups over all tiers, and pins for readers. Puts are in `core/puts.py`.

    lookup                    the longest held prefix of a chain, and the tier of each block
    pin -> renew -> release   a held prefix in registered memory, kept there under a lease

The store knows hashes and bytes, no gRPC. It runs on the event loop only. Every resource hangs on a lease,
and `expire` frees the resources of leases that were not renewed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from libs.common.telemetry import tracing
from libs.common.telemetry.counters import Counters
from services.kvstore.core.leases import LeaseRecord, LeaseTable
from services.kvstore.core.load_group import LoadGroup
from services.kvstore.disk.set import DiskSet
from services.kvstore.dram.slots import Block
from services.kvstore.dram.tier import DramTier
from services.kvstore.loading.promotion import Promoter
from services.kvstore.loading.tombstones import Tombstones
from services.kvstore.loading.write_behind import DiskWriteBehind
from services.kvstore.policy.admission import DiskAdmission
from services.kvstore.pool.tier import PoolTier
from services.kvstore.unreachable.disks import DiskSweep
from services.kvstore.unreachable.memory import MemorySweep
from slipstream.v1.common_pb2 import CacheTier

log = logging.getLogger(__name__)

_DRAM, _NVME = CacheTier.CACHE_TIER_DRAM, CacheTier.CACHE_TIER_NVME  # each enum look-up by name costs 1 us
_POOL = CacheTier.CACHE_TIER_POOL

# A pin counts a block that the disk does not deliver in this time as a miss.
DISK_DEADLINE_S = 2.0
LAST_WRITE_S = 0.5
FLUSH_TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class PinnedBlock:
    """A block in registered memory, and the tier that had it before the pin."""

    block: Block[bytes]
    tier: CacheTier.ValueType


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned prefix under a lease. `lease` is None if nothing is held."""

    lease: LeaseRecord[list[Block[bytes]]] | None
    blocks: list[PinnedBlock]


class BlockStore:
    """Lookups and pins over memory, disks and pool."""

    def __init__(
        self,
        dram: DramTier,
        disk: DiskSet | None,
        counters: Counters,
        *,
        now_ms: Callable[[], float],
        admission: DiskAdmission | None = None,
        pool: PoolTier | None = None,
    ) -> None:
        """`admission` selects the blocks to write to disks; without it all blocks are written."""
        self.dram = dram
        self.disk = disk
        self.pool = pool
        self.memory_sweep = MemorySweep(dram, is_held=self.is_readable)
        self.disk_sweep = DiskSweep(disk, dram, self) if disk is not None else None
        self.tombstones = Tombstones()
        if pool is not None:
            pool.is_held_locally = self.contains
            pool.use_tombstones(self.tombstones)
        self.write_behind = DiskWriteBehind(dram, disk) if disk is not None else None
        self.promoter = Promoter(dram, disk, self.tombstones) if disk is not None else None
        self.admission = admission or DiskAdmission(None)
        self._counters = counters
        self._now_ms = now_ms
        self._pins: LeaseTable[list[Block[bytes]]] = LeaseTable(lambda: secrets.token_hex(16))
        self._pinning = 0

    @property
    def pins(self) -> int:
        """Number of live pin leases."""
        return len(self._pins)

    @property
    def pinned_blocks(self) -> int:
        """Number of distinct blocks under those leases."""
        return len({block.key for lease in self._pins for block in lease.resource})

    @property
    def leaked_blocks(self) -> int:
        """Held blocks without an owner: 0 unless there is a defect. Undefined while a pin is in progress."""
        table = self.dram.table
        writing = self.write_behind.writing if self.write_behind is not None else 0
        writing += self.pool.held_blocks if self.pool is not None else 0
        held = table.n_blocks - table.n_evictable
        return 0 if self._pinning else max(0, held - self.pinned_blocks - writing)

    def contains(self, key: bytes) -> bool:
        """Whether a tier of this node holds the block."""
        return self.dram.get(key) is not None or (self.disk is not None and self.disk.contains(key))

    def knows_all(self) -> bool:
        """Whether a block that is on no disk and in no memory is certainly not in the pool."""
        return self.pool is None or self.pool.knows_all

    def is_readable(self, key: bytes) -> bool:
        """Whether a tier of this node holds the block, or the pool does."""
        return self.contains(key) or (self.pool is not None and key in self.pool.inventory)

    def lookup_local(self, chain: Sequence[bytes]) -> list[CacheTier.ValueType]:
        """The tier of each block of the longest prefix that this node holds. Counts as a use of the chain."""
        self._touch(chain)
        return self._local_tiers(chain)

    async def lookup(self, chain: Sequence[bytes]) -> list[CacheTier.ValueType]:
        """The tier of each block of the longest prefix held here or in the pool. Counts as a use."""
        self._touch(chain)
        tiers, _ = await self._find_tiers(chain, wait_s=DISK_DEADLINE_S)
        return tiers

    def prefetch(self, chain: Sequence[bytes]) -> None:
        """Start loading the disk blocks of the held prefix, since a pin of it is likely to follow."""
        if self.promoter is not None:
            tiers = self._local_tiers(chain)
            self.promoter.prefetch([key for key, tier in zip(chain, tiers, strict=False) if tier == _NVME])

    def _local_tiers(self, chain: Sequence[bytes]) -> list[CacheTier.ValueType]:
        in_memory = self.dram.table.held(chain)
        if all(in_memory) or self.disk is None:
            held = in_memory
        else:
            on_disk = self.disk.held(chain)
            held = [either or other for either, other in zip(in_memory, on_disk, strict=True)]
        end = held.index(False) if not all(held) else len(held)
        return [_DRAM if each else _NVME for each in in_memory[:end]]

    async def _find_tiers(
        self, chain: Sequence[bytes], *, wait_s: float
    ) -> tuple[list[CacheTier.ValueType], dict[bytes, int]]:
        """The tier of each block of the longest held prefix, and the value sizes of its pool blocks.

        One call asks the pool for all blocks that this node lacks.
        """
        tiers = self._local_tiers(chain)
        if self.pool is None or self.pool.unavailable or len(tiers) == len(chain):
            return tiers, {}
        rest = chain[len(tiers) :]
        lacking = [key for key in rest if not self.contains(key)]
        with tracing.span("find", wanted_blocks=len(lacking)) as opened:
            found = await self.pool.find(lacking, wait_s=wait_s)
            tracing.annotate(opened, blocks=len(found))
        for key in rest:
            if self.dram.get(key) is not None:
                tiers.append(_DRAM)
            elif self.disk is not None and self.disk.contains(key):
                tiers.append(_NVME)
            elif key in found:
                tiers.append(_POOL)
            else:
                break
        return tiers, found

    async def pin(
        self,
        chain: Sequence[bytes],
        *,
        owner: str,
        requested_ms: int,
        first_block: int = 0,
        tenant: bytes = b"",
        disk_wait_s: float = DISK_DEADLINE_S,
    ) -> Pin:
        """Load the held prefix of `chain` from `first_block` on, and keep it in memory under a lease.

        The prefix ends before the first block that is not held, does not verify or finds no room in memory.
        So does it before one that a disk or the pool does not deliver within `disk_wait_s`.
        """
        self._pinning += 1
        try:
            self._touch(chain, tenant)
            pinned = await self._load_prefix(chain[first_block:], wait_s=disk_wait_s)
        finally:
            self._pinning -= 1
        self._count(pinned, asked=len(chain[first_block:]))
        if self.admission.limited:  # admission may accept by now what it refused at the put
            self._to_disk([each.block.key for each in pinned if each.tier == CacheTier.CACHE_TIER_DRAM])
        if not pinned:
            return Pin(None, [])
        blocks = [each.block for each in pinned]
        return Pin(
            self._pins.grant(blocks, owner=owner, requested_ms=requested_ms, now_ms=self._now_ms()), pinned
        )

    async def _load_prefix(self, chain: Sequence[bytes], *, wait_s: float) -> list[PinnedBlock]:
        """The leading blocks that are held in any tier, loaded into memory and held for the caller."""
        deadline_s = asyncio.get_running_loop().time() + wait_s
        tiers, in_pool = await self._find_tiers(chain, wait_s=wait_s)
        wanted = chain[: len(tiers)]
        in_memory = self._hold(wanted)
        pinned: list[PinnedBlock] = []
        with LoadGroup(self.promoter, self.pool) as loads:
            try:
                if None in in_memory:
                    missing = [key for key, block in zip(wanted, in_memory, strict=True) if block is None]
                    loads.start(missing, in_pool)
                    self._counters.add("slipstream_kvstore_disk_waits_total", loads.from_disk)
                    await loads.wait(until_s=deadline_s)
                pinned = _leading_blocks(wanted, in_memory, loads)
            finally:
                self._unhold([block for block in in_memory[len(pinned) :] if block is not None])
        return pinned

    def renew_pin(self, lease_id: str, *, requested_ms: int) -> None:
        """Extend a pin. Raises NotFound if it has ended."""
        self._pins.renew(lease_id, requested_ms=requested_ms, now_ms=self._now_ms())

    def release_pin(self, lease_id: str) -> None:
        """End a pin. Idempotent."""
        lease = self._pins.end(lease_id)
        if lease is not None:
            self._unhold(lease.resource)

    def expire(self) -> int:
        """End the pins that are due; returns how many."""
        due = self._pins.expire(now_ms=self._now_ms())
        for lease in due:
            self._unhold(lease.resource)
        return len(due)

    def drop_unreachable(self) -> int:
        """Drop some unreachable blocks from memory and disks; returns how many."""
        on_disk = self.disk_sweep.sweep(now_s=self._now_ms() / 1000) if self.disk_sweep is not None else 0
        return self.memory_sweep.sweep() + on_disk

    def start(self) -> None:
        """Start the background work; needs a running loop."""
        if self.disk is not None:
            self.disk.start()
        if self.write_behind is not None:
            self.write_behind.start()
        if self.pool is not None:
            self.pool.start()

    def write_back(self, keys: Sequence[bytes]) -> None:
        """Queue blocks in memory for the pool, and those that admission accepts for a disk."""
        if self.pool is not None:
            self.pool.offer(keys)
        self._to_disk(keys)

    def _to_disk(self, keys: Sequence[bytes]) -> None:
        if self.write_behind is None or self.disk is None:
            return
        now_ms = self._now_ms()
        for key in keys:
            block = self.dram.get(key)
            if block is None or (self.admission.limited and self.disk.contains(key)):
                continue
            reuse = self.dram.table.expected_reuse(block) if self.admission.limited else 1.0
            if self.admission.admits(reuse, block.slot.slot_bytes, now_ms=now_ms):
                self.write_behind.add(key)

    async def durable(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bytes]:
        """The blocks of `keys` that survive a crash of this node. Waits for blocks that are being written.

        With a positive `timeout_s` it also writes blocks that admission had refused.
        """
        if self.write_behind is None or self.disk is None:
            return []
        if self.admission.limited and timeout_s > 0:
            for key in keys:
                block = self.dram.get(key)
                if block is not None and self.write_behind.add_if_missing(key):
                    self.admission.forced(block.slot.slot_bytes)
        return await self.write_behind.durable(keys, timeout_s=timeout_s)

    async def close(self, *, flush_timeout_s: float) -> None:
        """Write the queued blocks within the time, then end the background work."""
        if self.pool is not None:
            await self.pool.close(flush_timeout_s=flush_timeout_s)
        if self.write_behind is None or self.promoter is None or self.disk is None:
            return
        flushing = asyncio.create_task(self.write_behind.flush(timeout_s=flush_timeout_s))
        while not flushing.done() and self.disk.takes_blocks:
            await asyncio.wait({flushing}, timeout=FLUSH_TICK_S)
        # The wait ends when no disk takes blocks, except for a write that is about to end.
        await asyncio.wait({flushing}, timeout=LAST_WRITE_S)
        flushing.cancel()
        await self.promoter.close(timeout_s=DISK_DEADLINE_S)
        await self.write_behind.close()

    def _hold(self, keys: Sequence[bytes]) -> list[Block[bytes] | None]:
        """Hold the blocks that are in memory; None for the others."""
        blocks = [self.dram.get(key) for key in keys]
        for block in blocks:
            if block is not None:
                self.dram.table.hold(block)
        return blocks

    def _unhold(self, blocks: Sequence[Block[bytes]]) -> None:
        for block in reversed(blocks):  # so the chain's start becomes the most recent
            self.dram.table.unhold(block)

    def _touch(self, chain: Sequence[bytes], tenant: bytes = b"") -> None:
        self.dram.table.touch(chain, tenant=tenant, now_ms=self._now_ms())
        if self.disk is not None:
            self.disk.touch(chain, tenant=tenant, now_ms=self._now_ms())
        if self.pool is not None:
            self.pool.record_request(chain)

    def _count(self, pinned: Sequence[PinnedBlock], *, asked: int) -> None:
        from_disk = sum(each.tier == _NVME for each in pinned)
        from_pool = sum(each.tier == _POOL for each in pinned)
        self._counters.add("slipstream_kvstore_hits_nvme_total", from_disk)
        self._counters.add("slipstream_kvstore_hits_pool_total", from_pool)
        self._counters.add("slipstream_kvstore_hits_dram_total", len(pinned) - from_disk - from_pool)
        self._counters.add("slipstream_kvstore_misses_total", asked - len(pinned))


def _leading_blocks(
    keys: Sequence[bytes], in_memory: Sequence[Block[bytes] | None], loads: LoadGroup
) -> list[PinnedBlock]:
    """The blocks before the first gap, each with its tier, held for the caller."""
    pinned: list[PinnedBlock] = []
    for key, block in zip(keys, in_memory, strict=True):
        if block is not None:
            pinned.append(PinnedBlock(block, _DRAM))
        elif (load := loads.pop(key)) is not None:
            tier, loaded = load
            pinned.append(PinnedBlock(loaded, tier))
        else:
            break
    return pinned

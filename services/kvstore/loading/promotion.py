"""Blocks on their way from disk to DRAM.

A block is loaded once for all who want it, in batches: the blocks of a pin go to the disk's queue together.
The load owns the destination slot until the disk has let go of it. Whoever waits may give up, and does when
the disk goes away; a load that runs then ends by itself and the block stays, one that has not begun is not
made. Of each disk a bounded number of slots waits at once: one that hangs keeps neither the others nor the
memory waiting. Who waits for few blocks does not wait for all of another's (`pin_order.py`).

A prefetch is a load that nobody waits for yet; it goes behind all that somebody waits for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from services.kvstore.disk.reads import ReadResult
from services.kvstore.disk.set import DiskSet
from services.kvstore.disk.tier import DiskTier
from services.kvstore.dram.slots import Block, Slot
from services.kvstore.dram.tier import DramTier
from services.kvstore.loading.pending_loads import PendingLoads
from services.kvstore.loading.pin_order import PinOrder
from services.kvstore.loading.tombstones import Tombstones
from slipstream.errors import SlipstreamError

log = logging.getLogger(__name__)

# Slots in memory that wait for one disk at once. Enough for runs of neighbours to be read together.
CONCURRENT = 64
# Of the memory, the part that may wait for one disk; and what prefetches may take of it in all.
LOADING_PART = 4
PREFETCH_PART = 4
# A shorter wait says nothing about the disk: this process may not have got the processor.
LATE_AFTER_S = 0.05


class Promotion(PendingLoads):
    """The blocks of a chain that one reader wants."""

    def __init__(self, promoter: Promoter, keys: Sequence[bytes]) -> None:
        super().__init__(promoter.dram, keys, leave=lambda left: promoter.leave(self, left))
        self._promoter = promoter
        self._keys = list(dict.fromkeys(keys))
        self._at = 0
        self._settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self, *, timeout_s: float) -> None:
        """Until all came, or one did not and those before it did, or the time is over. A disk of which
        nothing at all was heard in that time is told that it is late."""
        ended = {tier: tier.reads_ended for tier in self._promoter.tiers}
        await asyncio.wait([self._settled], timeout=timeout_s)
        if self._settled.done() or timeout_s < LATE_AFTER_S:
            return
        for tier, before in ended.items():
            if tier.reads_ended == before and any(map(tier.contains, self._left)):
                tier.watch.was_late()

    def settle(self, key: bytes, block: Block[bytes] | None) -> None:
        super().settle(key, block)
        while self._at < len(self._keys) and self._keys[self._at] not in self._left:
            missed = self._keys[self._at] not in self._came
            self._at = len(self._keys) if missed else self._at + 1  # beyond a gap nothing is of use
        if self._at >= len(self._keys) and not self._settled.done():
            self._settled.set_result(None)


class Promoter:
    """Loads in progress. Event loop only."""

    def __init__(
        self,
        dram: DramTier,
        disks: DiskSet,
        drops: Tombstones | None = None,
        *,
        order: Callable[[], PinOrder[Promotion]] = PinOrder,
    ) -> None:
        self._drops = drops or Tombstones()
        self.dram = dram
        self._disks = disks
        self._wanted: dict[bytes, list[Promotion]] = {}  # of all that are queued or being loaded
        self._running: dict[bytes, Slot] = {}
        self._orders = {tier: order() for tier in disks.tiers}
        # Each with the bytes of its slot.
        self._prefetches: dict[DiskTier, OrderedDict[bytes, int]] = {t: OrderedDict() for t in disks.tiers}
        self._loading: dict[DiskTier, int] = dict.fromkeys(disks.tiers, 0)
        self._loading_bytes: dict[DiskTier, int] = dict.fromkeys(disks.tiers, 0)
        self._tasks: set[asyncio.Task[None]] = set()
        for tier in disks.tiers:
            tier.watch.on_away = self._some_disk_went_away

    @property
    def tiers(self) -> list[DiskTier]:
        """The disks."""
        return self._disks.tiers

    @property
    def n_running(self) -> int:
        """Slots in memory that a disk may write to."""
        return len(self._running)

    @property
    def quarantined_bytes(self) -> int:
        """Memory that disks which are away may still write to; whoever waited for it has gone on."""
        return sum(n_bytes for tier, n_bytes in self._loading_bytes.items() if tier.away)

    def begin(self, keys: Sequence[bytes]) -> Promotion:
        """Load these blocks of a chain, which are not in memory. Who calls this calls `end`."""
        promotion = Promotion(self, keys)
        waiting: dict[DiskTier, list[bytes]] = {}
        for key in dict.fromkeys(keys):
            tier = self._disks.tier_of(key)
            if tier is None:
                promotion.settle(key, None)
                continue
            self._wanted.setdefault(key, []).append(promotion)
            if key not in self._running:
                self._prefetches[tier].pop(key, None)
                waiting.setdefault(tier, []).append(key)
        for tier, its_keys in waiting.items():
            self._orders[tier].add(promotion, its_keys)
        for tier in waiting:
            self._pump(tier)
        return promotion

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Load these blocks when the disks have nothing better to do; as many as there is room for beside
        those that wait already."""
        tiers: dict[DiskTier, None] = {}
        room = self.dram.memory.n_bytes // PREFETCH_PART
        room -= sum(sum(waiting.values()) for waiting in self._prefetches.values())
        for key in keys:
            block = self._disks.get(key)
            tier = self._disks.tier_of(key)
            if block is None or tier is None or key in self._wanted:
                continue
            room -= block.slot.slot_bytes
            if room < 0:
                break
            self._wanted[key] = []
            self._prefetches[tier][key] = block.slot.slot_bytes
            tiers[tier] = None
        for tier in tiers:
            self._pump(tier)

    def leave(self, promotion: Promotion, keys: set[bytes]) -> None:
        """The promotion wants nothing more; `keys`: what it still wanted."""
        for order in self._orders.values():
            order.leave(promotion)
        for key in keys:
            waiting = self._wanted.get(key)
            if waiting is None or promotion not in waiting:
                continue
            waiting.remove(promotion)
            if not waiting and key not in self._running:
                self._forget(key)

    async def close(self, *, timeout_s: float) -> None:
        """Begin nothing more and wait for what runs."""
        for key in [key for key in self._wanted if key not in self._running]:
            self._settle(key, None)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    def _pump(self, tier: DiskTier) -> None:
        """Give the disk as much as it may have at once."""
        most_bytes = self.dram.memory.n_bytes // LOADING_PART
        batch: list[tuple[bytes, Slot]] = []
        while self._loading[tier] < CONCURRENT and (key := self._next(tier)) is not None:
            present = self.dram.get(key)
            on_disk = tier.table.get(key) if present is None and not tier.away else None
            if on_disk is None:
                self._settle(key, present)
                continue
            n_bytes = self._loading_bytes[tier] + on_disk.slot.slot_bytes
            if self._loading[tier] and n_bytes > most_bytes:
                break
            slot = self.dram.table.allocate(on_disk.n_bytes)
            if slot is None:
                self._settle(key, None)
                continue
            if key == self._orders[tier].first():
                self._orders[tier].take(key, self._wanted[key])
            self._unqueue(key)
            self._loading[tier] += 1
            self._loading_bytes[tier] = n_bytes
            self._running[key] = slot
            batch.append((key, slot))
        if batch:
            task = asyncio.create_task(self._load(tier, batch, begun=self._drops.epoch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next(self, tier: DiskTier) -> bytes | None:
        """The block to read next; None when none is wanted."""
        key = self._orders[tier].first()
        return key if key is not None else next(iter(self._prefetches[tier]), None)

    async def _load(self, tier: DiskTier, batch: Sequence[tuple[bytes, Slot]], *, begun: int) -> None:
        """Read the batch; each block is there for those who want it as soon as it is read. `begun`: in which
        epoch of drops."""
        wanted = [(key, self.dram.address_of(slot)) for key, slot in batch]

        def told(position: int, result: ReadResult) -> None:
            self._loaded(tier, batch[position][0], result, begun=begun)

        try:
            results = await tier.read_many(wanted, told=told)
            for (key, slot), result in zip(batch, results, strict=True):
                if self._running.get(key) == slot:  # it was not there any more, so nobody was told
                    self._loaded(tier, key, result, begun=begun)
        except Exception:  # a defect: these are misses, the next ones may be read
            log.exception("a promotion failed")
            for key, slot in batch:
                if self._running.get(key) == slot:
                    self._loaded(tier, key, None, begun=begun)
        finally:
            self._pump(tier)

    def _loaded(self, tier: DiskTier, key: bytes, result: ReadResult | None, *, begun: int) -> None:
        """The disk has let go of the slot."""
        slot = self._running.pop(key)
        self._loading[tier] -= 1
        self._loading_bytes[tier] -= slot.slot_bytes
        block = self.dram.get(key)  # put again meanwhile?
        if block is not None or result is None or isinstance(result, SlipstreamError):
            if isinstance(result, SlipstreamError):
                log.info("block %s not promoted: %s", key.hex(), result)
            self.dram.table.free(slot)
        elif self._drops.overtook(key, begun=begun):
            self.dram.table.free(slot)
        else:
            block = self.dram.table.publish(key, slot, *result)
        self._settle(key, block)
        if self._loading[tier] <= CONCURRENT // 2:
            self._pump(tier)

    def _settle(self, key: bytes, block: Block[bytes] | None) -> None:
        """All who want the block get it, held for each of them, or learn that it does not come."""
        waiting = self._wanted.get(key, [])
        self._forget(key)
        for promotion in waiting:
            if block is not None:
                self.dram.table.hold(block)
            promotion.settle(key, block)

    def _forget(self, key: bytes) -> None:
        self._unqueue(key)
        self._wanted.pop(key, None)

    def _unqueue(self, key: bytes) -> None:
        """It waits for no disk any more."""
        for order in self._orders.values():
            order.discard(key, self._wanted.get(key, ()))
        for prefetches in self._prefetches.values():
            prefetches.pop(key, None)

    def _some_disk_went_away(self) -> None:
        """Who waits for a disk that is away learns it at once."""
        for key in list(self._wanted):
            if self._disks.contains(key):
                continue
            if key not in self._running:
                self._settle(key, None)
                continue
            waiting, self._wanted[key] = self._wanted[key], []
            for promotion in waiting:
                promotion.settle(key, None)

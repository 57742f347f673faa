"""Promotion of blocks from disk to DRAM.

A block is loaded once for all readers, and the blocks of a pin enter the disk's queue as one batch. The load
owns the destination slot until the disk's read has ended. Readers stop waiting at a time-out, and at once
when the disk becomes unavailable. A running load then completes and publishes its block; a queued load is
cancelled.

Each disk may occupy a bounded number of slots, so that a hanging disk blocks neither other disks nor the
memory. `pin_order.py` keeps short pins from waiting for long ones.

A prefetch is a load without a reader; it runs after all loads that have one.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from services.kvstore.disk.queues.reads import ReadResult
from services.kvstore.disk.set import DiskSet
from services.kvstore.disk.tier import DiskTier
from services.kvstore.dram.slots import Block, Slot
from services.kvstore.dram.tier import DramTier
from services.kvstore.loading.pending_loads import PendingLoads
from services.kvstore.loading.pin_order import PinOrder
from services.kvstore.loading.tombstones import Tombstones
from slipstream.errors import SlipstreamError

log = logging.getLogger(__name__)

# Memory slots that one disk's reads may occupy: enough to read runs of neighbours together.
CONCURRENT = 64
# Reciprocal of the memory part that one disk's loads may occupy, and of the part for all prefetches.
LOADING_PART = 4
PREFETCH_PART = 4
# A shorter wait is no evidence about the disk: this process may have lacked CPU time.
LATE_AFTER_S = 0.05


class Promotion(PendingLoads):
    """The blocks of a chain that one reader waits for."""

    def __init__(self, promoter: Promoter, keys: Sequence[bytes]) -> None:
        super().__init__(promoter.dram, keys, cancel=lambda left: promoter.cancel(self, left))
        self._promoter = promoter
        self._keys = list(dict.fromkeys(keys))
        self._position = 0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def wait(self, *, timeout_s: float) -> None:
        """Wait for the prefix up to the first failed block, or until the time is over.

        Reports a disk as late if none of its reads ended in that time.
        """
        ended = {tier: tier.reads_ended for tier in self._promoter.tiers}
        await asyncio.wait([self._done], timeout=timeout_s)
        if self._done.done() or timeout_s < LATE_AFTER_S:
            return
        for tier, before in ended.items():
            if tier.reads_ended == before and any(map(tier.contains, self._pending)):
                tier.watch.record_late()

    def complete(self, key: bytes, block: Block[bytes] | None) -> None:
        super().complete(key, block)
        while self._position < len(self._keys) and self._keys[self._position] not in self._pending:
            missed = self._keys[self._position] not in self._loaded_by_key
            if missed:  # blocks behind a gap are of no use
                self._position = len(self._keys)
            else:
                self._position += 1
        if self._position >= len(self._keys) and not self._done.done():
            self._done.set_result(None)


class Promoter:
    """Running and queued loads of a node. Event loop only."""

    def __init__(
        self,
        dram: DramTier,
        disks: DiskSet,
        tombstones: Tombstones | None = None,
        *,
        order: Callable[[], PinOrder[Promotion]] = PinOrder,
    ) -> None:
        self._tombstones = tombstones or Tombstones()
        self.dram = dram
        self._disks = disks
        self._wanted: dict[bytes, list[Promotion]] = {}  # queued or running
        self._running: dict[bytes, Slot] = {}
        self._orders = {tier: order() for tier in disks.tiers}
        # Values are slot sizes in bytes.
        self._prefetches: dict[DiskTier, OrderedDict[bytes, int]] = {t: OrderedDict() for t in disks.tiers}
        self._loading: dict[DiskTier, int] = dict.fromkeys(disks.tiers, 0)
        self._loading_bytes: dict[DiskTier, int] = dict.fromkeys(disks.tiers, 0)
        self._tasks: set[asyncio.Task[None]] = set()
        for tier in disks.tiers:
            tier.listeners.append(self)

    @property
    def tiers(self) -> list[DiskTier]:
        """The disks."""
        return self._disks.tiers

    @property
    def quarantined_bytes(self) -> int:
        """Memory that unavailable disks may still write to. Its readers no longer wait."""
        return sum(n_bytes for tier, n_bytes in self._loading_bytes.items() if tier.unavailable)

    def promote(self, keys: Sequence[bytes]) -> Promotion:
        """Load these blocks of a chain, which are not in memory. The caller closes the promotion."""
        promotion = Promotion(self, keys)
        waiting: dict[DiskTier, list[bytes]] = {}
        for key in dict.fromkeys(keys):
            tier = self._disks.tier_of(key)
            if tier is None:
                promotion.complete(key, None)
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
        """Load these blocks when the disks are idle, up to the memory bound for prefetches."""
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

    def cancel(self, promotion: Promotion, keys: set[bytes]) -> None:
        """Remove a promotion; `keys` are its pending blocks."""
        for order in self._orders.values():
            order.remove(promotion)
        for key in keys:
            waiting = self._wanted.get(key)
            if waiting is None or promotion not in waiting:
                continue
            waiting.remove(promotion)
            if not waiting and key not in self._running:
                self._remove(key)

    async def close(self, *, timeout_s: float) -> None:
        """Cancel queued loads and wait for running ones."""
        for key in [key for key in self._wanted if key not in self._running]:
            self._complete(key, None)
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    def _pump(self, tier: DiskTier) -> None:
        """Start reads up to the disk's bounds."""
        most_bytes = self.dram.memory.n_bytes // LOADING_PART
        batch: list[tuple[bytes, Slot]] = []
        while self._loading[tier] < CONCURRENT and (key := self._next(tier)) is not None:
            present = self.dram.get(key)
            on_disk = tier.table.get(key) if present is None and not tier.unavailable else None
            if on_disk is None:
                self._complete(key, present)
                continue
            n_bytes = self._loading_bytes[tier] + on_disk.slot.slot_bytes
            if self._loading[tier] and n_bytes > most_bytes:
                break
            slot = self.dram.table.allocate(on_disk.n_bytes)
            if slot is None:
                self._complete(key, None)
                continue
            if key == self._orders[tier].first():
                self._orders[tier].begin_read(key, self._wanted[key])
            self._unqueue(key)
            self._loading[tier] += 1
            self._loading_bytes[tier] = n_bytes
            self._running[key] = slot
            batch.append((key, slot))
        if batch:
            task = asyncio.create_task(self._load(tier, batch, since_epoch=self._tombstones.epoch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _next(self, tier: DiskTier) -> bytes | None:
        """The block to read next; None if none is wanted."""
        key = self._orders[tier].first()
        return key if key is not None else next(iter(self._prefetches[tier]), None)

    async def _load(self, tier: DiskTier, batch: Sequence[tuple[bytes, Slot]], *, since_epoch: int) -> None:
        """Read the batch; readers get each block as soon as its read ends.

        `since_epoch`: the tombstones' epoch at the start of the load.
        """
        wanted = [(key, self.dram.address_of(slot)) for key, slot in batch]

        def on_read(position: int, result: ReadResult) -> None:
            self._loaded(tier, batch[position][0], result, since_epoch=since_epoch)

        try:
            results = await tier.read_many(wanted, on_read=on_read)
            for (key, slot), result in zip(batch, results, strict=True):
                if (
                    self._running.get(key) == slot
                ):  # the tier no longer had the block and did not call `on_read`
                    self._loaded(tier, key, result, since_epoch=since_epoch)
        except Exception:  # a defect: these blocks are misses, and later loads go on
            log.exception("a promotion failed")
            for key, slot in batch:
                if self._running.get(key) == slot:
                    self._loaded(tier, key, None, since_epoch=since_epoch)
        finally:
            self._pump(tier)

    def _loaded(self, tier: DiskTier, key: bytes, result: ReadResult | None, *, since_epoch: int) -> None:
        """Publish the block or free its slot, which the disk no longer uses."""
        slot = self._running.pop(key)
        self._loading[tier] -= 1
        self._loading_bytes[tier] -= slot.slot_bytes
        block = self.dram.get(key)  # a put may have published it meanwhile
        if block is not None or result is None or isinstance(result, SlipstreamError):
            if isinstance(result, SlipstreamError):
                log.info("block %s not promoted: %s", key.hex(), result)
            self.dram.table.free(slot)
        elif self._tombstones.covers(key, since_epoch=since_epoch):
            self.dram.table.free(slot)
        else:
            block = self.dram.table.publish(key, slot, *result)
        self._complete(key, block)
        if self._loading[tier] <= CONCURRENT // 2:
            self._pump(tier)

    def _complete(self, key: bytes, block: Block[bytes] | None) -> None:
        """Pass the block, held once for each reader, to all its readers; None: it was not loaded."""
        waiting = self._wanted.get(key, [])
        self._remove(key)
        for promotion in waiting:
            if block is not None:
                self.dram.table.hold(block)
            promotion.complete(key, block)

    def _remove(self, key: bytes) -> None:
        self._unqueue(key)
        self._wanted.pop(key, None)

    def _unqueue(self, key: bytes) -> None:
        """Remove the block from all disk queues."""
        for order in self._orders.values():
            order.discard(key, self._wanted.get(key, ()))
        for prefetches in self._prefetches.values():
            prefetches.pop(key, None)

    def blocks_lost(self, keys: Sequence[bytes]) -> None:
        """See `DiskListener`. Loads of lost blocks end by themselves."""

    def disk_changed(self) -> None:
        """Fail the loads of unavailable disks at once."""
        if not any(tier.unavailable for tier in self.tiers):
            return
        for key in list(self._wanted):
            if self._disks.contains(key):
                continue
            if key not in self._running:
                self._complete(key, None)
                continue
            waiting, self._wanted[key] = self._wanted[key], []
            for promotion in waiting:
                promotion.complete(key, None)

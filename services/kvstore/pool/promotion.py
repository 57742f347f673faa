"""Promotion of blocks from the pool to DRAM.

A block is loaded once for all readers, in batches, into memory shared with the agent. Only then it gets a
slot, is copied there and verified in place. So a stalled pool node occupies no slot.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Iterator, Mapping, Sequence

from libs.common.checksum import KvChecksum
from services.kvstore.dram.slots import Block, Slot
from services.kvstore.dram.tier import DramTier
from services.kvstore.loading.pending_loads import PendingLoads
from services.kvstore.loading.tombstones import Tombstones
from services.kvstore.pool.agent.protocol import CORRUPT
from services.kvstore.pool.agent_client import AgentClient, Staged
from services.kvstore.pool.value import HEADER_BYTES, header_proof, proof_of
from slipstream.errors import Unavailable

log = logging.getLogger(__name__)

# While one batch is verified and copied, the next one is transferred.
MAX_BATCH_BLOCKS = 64
MAX_BATCH_BYTES = 9 << 20
# The agent answers a get within 1.5 s plus its call to the master.
GET_S = 2.5


class PoolPromotion(PendingLoads):
    """The blocks that one reader waits for."""

    def __init__(self, promoter: PoolPromoter, keys: Sequence[bytes]) -> None:
        super().__init__(promoter.dram, keys, cancel=lambda left: promoter.cancel(self, left))
        self._done = asyncio.Event()
        if not self._pending:
            self._done.set()

    async def wait(self, *, timeout_s: float) -> None:
        """Wait until each load has ended, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._done.wait()
        except TimeoutError:
            return

    def complete(self, key: bytes, block: Block[bytes] | None) -> None:
        super().complete(key, block)
        if not self._pending:
            self._done.set()


class PoolPromoter:
    """Running loads of a node. Event loop only."""

    def __init__(self, dram: DramTier, client: AgentClient) -> None:
        self.tombstones = Tombstones()
        self.dram = dram
        self._client = client
        self._wanted: dict[bytes, list[PoolPromotion]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.corrupt_blocks = 0
        self.failovers = 0

    def promote(self, sizes: Mapping[bytes, int]) -> PoolPromotion:
        """Load these blocks, which are not in memory. The caller closes the promotion.

        `sizes`: bytes of their values.
        """
        promotion = PoolPromotion(self, list(sizes))
        new = {key: n_bytes for key, n_bytes in sizes.items() if key not in self._wanted}
        for key in sizes:
            self._wanted.setdefault(key, []).append(promotion)
        for batch in _batches(new, max_bytes=min(MAX_BATCH_BYTES, self._client.options.staging_bytes // 4)):
            task = asyncio.create_task(self._load(batch, since_epoch=self.tombstones.epoch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return promotion

    def cancel(self, promotion: PoolPromotion, keys: set[bytes]) -> None:
        """Remove a promotion from these blocks. Running loads go on and publish them."""
        for key in keys:
            if promotion in self._wanted.get(key, ()):
                self._wanted[key].remove(promotion)

    async def close(self, *, timeout_s: float) -> None:
        """Wait for running loads."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    async def _load(self, sizes: Mapping[bytes, int], *, since_epoch: int) -> None:
        """Fetch the batch and complete its blocks. `since_epoch`: the tombstones' epoch at the start."""
        staged: Staged | None = None
        try:
            staged = await self._client.stage(list(sizes.values()), timeout_s=GET_S)
            answer = await self._client.call(
                "get",
                timeout_s=GET_S,
                staged=staged,
                keys=[key.hex() for key in sizes],
                at=[extent.offset for extent in staged.extents],
                sizes=list(sizes.values()),
            )
            self.failovers += answer["failovers"]
            self.corrupt_blocks += answer["outcome"].count(CORRUPT)
            await self._publish_arrived(sizes, staged, answer["outcome"], since_epoch=since_epoch)
        except Unavailable as error:
            log.info("%d blocks not loaded from the pool: %s", len(sizes), error)
        except Exception:  # a defect: these blocks are misses, and later loads go on
            log.exception("a load from the pool failed")
        finally:
            if staged is not None:
                self._client.release(staged, "caller")
            for key in sizes:
                self._complete(key, self.dram.get(key))

    async def _publish_arrived(
        self, sizes: Mapping[bytes, int], staged: Staged, outcome: Sequence[int], *, since_epoch: int
    ) -> None:
        """Copy arrived values to slots, and publish those that verify there."""
        arrived: list[tuple[bytes, Slot, int, int, bytes]] = []
        for (key, n_bytes), extent, got in zip(sizes.items(), staged.extents, outcome, strict=True):
            if got != n_bytes or self.dram.get(key) is not None:
                continue
            proof = header_proof(self._client.memory.view(extent.offset, n_bytes), key)
            slot = None if proof is None else self.dram.table.allocate(n_bytes - HEADER_BYTES)
            if proof is None or slot is None:
                continue
            source = self._client.memory.address + extent.offset + HEADER_BYTES
            arrived.append((key, slot, source, n_bytes - HEADER_BYTES, proof))
        slots = [slot for _, slot, *_ in arrived]
        found = await self._copied(slots, [(source, n_bytes) for _, _, source, n_bytes, _ in arrived])
        for (key, slot, _, n_bytes, proof), have in zip(arrived, found, strict=True):
            if proof_of(key, n_bytes, have, self.dram.checksum) != proof:
                self.corrupt_blocks += 1
                self.dram.table.free(slot)
            elif self.dram.get(key) is not None or self.tombstones.covers(key, since_epoch=since_epoch):
                self.dram.table.free(slot)
            else:
                self.dram.table.publish(key, slot, n_bytes, have)

    async def _copied(self, slots: Sequence[Slot], sources: Sequence[tuple[int, int]]) -> list[bytes]:
        """Copy each (address, bytes) to its slot in a thread; returns the checksums.

        On failure or cancellation the slots are freed, after the thread has finished with them.
        """
        copies = [(self.dram.address_of(slot), *source) for slot, source in zip(slots, sources, strict=True)]

        def free(_: object = None) -> None:
            for slot in slots:
                self.dram.table.free(slot)

        try:
            copying = asyncio.get_running_loop().run_in_executor(None, _copied, copies, self.dram.checksum)
        except RuntimeError:  # no thread available
            free()
            raise
        try:
            return await asyncio.shield(copying)
        except BaseException:
            copying.add_done_callback(free)
            raise

    def _complete(self, key: bytes, block: Block[bytes] | None) -> None:
        for promotion in self._wanted.pop(key, ()):
            if block is not None:
                self.dram.table.hold(block)
            promotion.complete(key, block)


def _copied(copies: Sequence[tuple[int, int, int]], checksum: KvChecksum) -> list[bytes]:
    """Copy each (to, from, bytes); returns the checksums of the copies."""
    found = []
    for to, source, n_bytes in copies:
        ctypes.memmove(to, source, n_bytes)
        found.append(checksum.at(to, n_bytes))
    return found


def _batches(sizes: Mapping[bytes, int], *, max_bytes: int) -> Iterator[dict[bytes, int]]:
    batch: dict[bytes, int] = {}
    for key, n_bytes in sizes.items():
        if batch and (len(batch) == MAX_BATCH_BLOCKS or sum(batch.values()) + n_bytes > max_bytes):
            yield batch
            batch = {}
        batch[key] = n_bytes
    if batch:
        yield batch

"""DRAM to the pool, behind the back of Commit, as to the disks: nobody waits for it.

While the pool is away blocks wait. When it is back, all that is in memory is offered anew: a master without
its log has forgotten everything. What the pool has already is not put again.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from services.kvstore.dram.slots import Block
from services.kvstore.dram.tier import DramTier
from services.kvstore.loading.write_queue import WriteQueue
from services.kvstore.pool.agent_client import AgentClient
from services.kvstore.pool.value import HEADER_BYTES, Hint, sealed_header, tag_of
from slipstream.errors import Unavailable

log = logging.getLogger(__name__)

MAX_BATCH_BLOCKS = 16
BATCHES_AT_ONCE = 2
MAX_KNOWN_BLOCKS = 65_536
SAMPLE_BLOCKS = 4
FIND_S = 1.0
PUT_S = 5.0
# A put that found no room, or only dead nodes, is tried again, later and later.
TRIES = 4
RETRY_S = 0.5


class PoolWrites:
    """Blocks waiting to be put, and those being put. Event loop only."""

    def __init__(self, dram: DramTier, client: AgentClient) -> None:
        self._dram = dram
        self._client = client
        self._waiting = WriteQueue(on_given_up=self._forget_tries)
        self._known: OrderedDict[bytes, int] = OrderedDict()  # what the pool has, and its bytes
        self._tries: dict[bytes, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused: asyncio.TimerHandle | None = None
        self._closing = False
        self.on_put: Callable[[Block[bytes], bytes | None], None] = lambda block, before: None
        self.held_blocks = 0  # in memory, because they are being copied
        self.put_blocks = 0

    @property
    def dropped_blocks(self) -> int:
        """Blocks that were given up: puts outran the pool, or failed again and again."""
        return self._waiting.dropped_blocks

    @property
    def known(self) -> tuple[int, int]:
        """Blocks that this node put and has not seen go, and their bytes."""
        return len(self._known), sum(self._known.values())

    def known_keys(self) -> list[bytes]:
        """Those blocks."""
        return list(self._known)

    @property
    def tried_blocks(self) -> int:
        """Blocks whose put has failed and which may be put again."""
        return len(self._tries)

    def offer(self, keys: Sequence[bytes]) -> None:
        """These blocks are in memory; those that the pool has not are put some time."""
        if self._closing:
            return
        for key in keys:
            self._waiting.add(key)
        self._pump()

    def forget(self, keys: Sequence[bytes]) -> None:
        """These are not in the pool, as far as it says."""
        for key in keys:
            self._known.pop(key, None)

    def withdraw(self, keys: Sequence[bytes] | None) -> None:
        """Do not put these, or anything for None, of what waits."""
        for key in list(self._waiting) if keys is None else keys:
            self._waiting.remove(key)
            self._forget_tries(key)
        self.forget(list(self._known) if keys is None else keys)

    def state_changed(self) -> None:
        """The pool went away or came back."""
        if self._client.available:
            self.offer(self._dram.table.keys())
        else:
            self._known.clear()
        self._pump()

    def sample(self) -> list[bytes]:
        """Some blocks that were put lately, to see whether they are still there."""
        return list(itertools.islice(reversed(self._known), SAMPLE_BLOCKS))

    def sampled(self, sizes: Mapping[bytes, int]) -> None:
        """What became of them. When all are gone a new master has forgotten everything: it may have come so
        soon that nobody saw the old one go."""
        gone = [key for key, n_bytes in sizes.items() if not n_bytes]
        if not gone:
            return
        if len(gone) == len(sizes):
            self._known.clear()
            gone = self._dram.table.keys()
        self.forget(gone)
        self.offer([key for key in gone if self._dram.get(key) is not None])

    async def settle(self, *, timeout_s: float) -> None:
        """Wait for the puts that run: what was withdrawn meanwhile comes by none of them afterwards."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until nothing waits or is being put; False when that took too long."""
        return await self._waiting.until_idle(timeout_s=timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        """Give up what waits; returns when the puts that run have ended."""
        self._closing = True
        self._waiting.clear()
        if self._paused is not None:
            self._paused.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    def _pump(self) -> None:
        while (
            self._waiting
            and self._paused is None
            and self._client.available
            and len(self._tasks) < BATCHES_AT_ONCE
        ):
            batch = self._next_batch()
            if batch:
                task = asyncio.create_task(self._put(batch))
                self._tasks.add(task)
                task.add_done_callback(self._ended)
        self._waiting.tell(idle=not self._tasks and not (self._waiting and self._client.available))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a put into the pool failed", exc_info=error)
        self._pump()

    def _next_batch(self) -> list[Block[bytes]]:
        """Blocks to put, held: until the task that puts them runs they could be evicted."""
        batch: list[Block[bytes]] = []
        n_bytes = 0
        while self._waiting and len(batch) < MAX_BATCH_BLOCKS:
            key = self._waiting.first()
            block = self._dram.get(key)
            if block is None or block.n_bytes + HEADER_BYTES > self._client.options.max_value_bytes:
                self._waiting.give_up(key)
                continue
            n_bytes += block.n_bytes + HEADER_BYTES
            if batch and n_bytes > self._client.options.staging_bytes // 4:
                break
            self._waiting.remove(key)
            self._dram.table.hold(block)
            batch.append(block)
        self.held_blocks += len(batch)
        return batch

    async def _put(self, batch: Sequence[Block[bytes]]) -> None:
        left = list(batch)
        try:
            keys = [block.key.hex() for block in batch]
            sizes = (await self._client.call("find", timeout_s=FIND_S, keys=keys))["sizes"]
            left = [block for block, n_bytes in zip(batch, sizes, strict=True) if not n_bytes]
            for block, n_bytes in zip(batch, sizes, strict=True):
                if n_bytes:
                    self._tries.pop(block.key, None)
                    self.on_put(block, None)  # somebody else's to look after
            if left:
                await self._put_missing(left)
        except Unavailable as error:
            log.info("%d blocks not put into the pool: %s", len(left), error)
            self._try_again([block.key for block in left])
        finally:
            self.held_blocks -= len(batch)
            for block in reversed(batch):
                self._dram.table.unhold(block)

    async def _put_missing(self, blocks: Sequence[Block[bytes]]) -> None:
        sizes = [block.n_bytes + HEADER_BYTES for block in blocks]
        staged = await self._client.stage(sizes, timeout_s=PUT_S)
        try:
            putter = tag_of(self._client.segment)
            copies = []
            for extent, block in zip(staged.extents, blocks, strict=True):
                to, before = self._client.memory.address + extent.offset, self._before(block)
                hint = None if before is None else Hint(before, putter)
                header = sealed_header(block.key, block.n_bytes, block.value, hint)
                copies.append((to, self._dram.address_of(block.slot), block.n_bytes, header))
            await asyncio.to_thread(_copy, copies)
        except BaseException:
            self._client.done_with(staged, "agent")
            raise
        finally:
            self._client.done_with(staged, "caller")
        answer = await self._client.call(
            "put",
            timeout_s=PUT_S,
            staged=staged,
            keys=[block.key.hex() for block in blocks],
            at=[extent.offset for extent in staged.extents],
            sizes=sizes,
        )
        again = []
        for block, code in zip(blocks, answer["outcome"], strict=True):
            if code == 0:
                self.put_blocks += 1
                self._tries.pop(block.key, None)
                self._known[block.key] = block.n_bytes
                self.on_put(block, self._before(block))
            else:
                again.append(block.key)
        while len(self._known) > MAX_KNOWN_BLOCKS:
            self._known.popitem(last=False)
        if again:
            self._try_again(again)

    def _before(self, block: Block[bytes]) -> bytes | None:
        """The block before it in its chain, if that is known."""
        place = self._dram.table.policy(block.slot.slot_bytes).place(block.key)
        return None if place is None else place[0]

    def _try_again(self, keys: Sequence[bytes]) -> None:
        if self._closing:
            return
        for key in keys:
            tries = self._tries.get(key, 0) + 1
            if self._client.available:  # else it is not the block's fault
                self._tries[key] = tries
            if tries >= TRIES:
                self._waiting.give_up(key)
            else:
                self._waiting.add(key)
        if self._paused is None:
            tries = max((self._tries.get(key, 0) for key in keys), default=0)
            self._paused = asyncio.get_running_loop().call_later(RETRY_S * 2**tries, self._resume)

    def _resume(self) -> None:
        self._paused = None
        self._pump()

    def _forget_tries(self, key: bytes) -> None:
        self._tries.pop(key, None)


def _copy(copies: Sequence[tuple[int, int, int, bytes]]) -> None:
    """Of each (to, from, bytes, header), header and payload to where they shall be."""
    for to, source, n_bytes, header in copies:
        ctypes.memmove(to, header, HEADER_BYTES)
        ctypes.memmove(to + HEADER_BYTES, source, n_bytes)

"""Write-behind from DRAM to the pool.

While the pool is unavailable blocks stay queued. When it is back, all blocks in memory are queued again,
since a restarted master may have lost its values. A lookup before each put skips the blocks that the pool
has.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from libs.common.checksum import checksum_at
from services.kvstore.dram.slots import Block
from services.kvstore.dram.tier import DramTier
from services.kvstore.loading.write_queue import WriteQueue
from services.kvstore.pool.agent_client import AgentClient
from services.kvstore.pool.value import HEADER_BYTES, ValueOrigin, pack_header, proof_of, tag_of
from slipstream.errors import Unavailable

log = logging.getLogger(__name__)

MAX_BATCH_BLOCKS = 16
BATCHES_AT_ONCE = 2
MAX_KNOWN_BLOCKS = 65_536
SAMPLE_BLOCKS = 4
FIND_S = 1.0
PUT_S = 5.0
# A put that found no room, or only dead nodes, is retried with back-off.
TRIES = 4
RETRY_S = 0.5


class PoolWrites:
    """Blocks that are queued for the pool, and those being put. Event loop only."""

    def __init__(self, dram: DramTier, client: AgentClient) -> None:
        self._dram = dram
        self._client = client
        self._waiting = WriteQueue(on_discard=self._clear_tries)
        self._known: OrderedDict[bytes, int] = OrderedDict()  # blocks the pool has -> their bytes
        self._tries: dict[bytes, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry_timer: asyncio.TimerHandle | None = None
        self._closing = False
        self.on_put: Callable[[Block[bytes], bytes | None], None] = lambda block, before: None
        self.held_blocks = 0  # held in memory while they are copied
        self.put_blocks = 0

    @property
    def dropped_blocks(self) -> int:
        """Number of blocks that were given up: puts outran the pool, or failed TRIES times."""
        return self._waiting.dropped_blocks

    @property
    def known(self) -> tuple[int, int]:
        """Number of blocks that this node put and has not seen disappear, and their bytes."""
        return len(self._known), sum(self._known.values())

    def known_keys(self) -> list[bytes]:
        """The hashes of those blocks."""
        return list(self._known)

    def offer(self, keys: Sequence[bytes]) -> None:
        """Queue blocks in memory; those that the pool lacks are put."""
        if self._closing:
            return
        for key in keys:
            self._waiting.add(key)
        self._start_puts()

    def discard_known(self, keys: Sequence[bytes]) -> None:
        """Remove blocks that the pool no longer has."""
        for key in keys:
            self._known.pop(key, None)

    def cancel(self, keys: Sequence[bytes] | None) -> None:
        """Remove these blocks (None: all) from the queue and from the known blocks."""
        for key in list(self._waiting) if keys is None else keys:
            self._waiting.remove(key)
            self._clear_tries(key)
        self.discard_known(list(self._known) if keys is None else keys)

    def state_changed(self) -> None:
        """Handle that the pool became unavailable or came back."""
        if self._client.available:
            self.offer(self._dram.table.keys())
        else:
            self._known.clear()
        self._start_puts()

    def probe_sample(self) -> list[bytes]:
        """The latest puts, which the next probe looks up."""
        return list(itertools.islice(reversed(self._known), SAMPLE_BLOCKS))

    def reconcile(self, sizes: Mapping[bytes, int]) -> None:
        """Reconcile the known blocks with the sizes that a probe found.

        If the pool lost all of them, a restarted master has lost its values: all blocks in memory are queued.
        """
        gone = [key for key, n_bytes in sizes.items() if not n_bytes]
        if not gone:
            return
        if len(gone) == len(sizes):
            self._known.clear()
            gone = self._dram.table.keys()
        self.discard_known(gone)
        self.offer([key for key in gone if self._dram.get(key) is not None])

    async def wait_running(self, *, timeout_s: float) -> None:
        """Wait for running puts, so that none of them stores a cancelled block afterwards."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    async def flush(self, *, timeout_s: float) -> bool:
        """Wait until no put is queued or running; False on time-out."""
        return await self._waiting.wait_idle(timeout_s=timeout_s)

    async def close(self, *, timeout_s: float) -> None:
        """Clear the queue and wait for running puts."""
        self._closing = True
        self._waiting.clear()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)

    def _start_puts(self) -> None:
        while (
            self._waiting
            and self._retry_timer is None
            and self._client.available
            and len(self._tasks) < BATCHES_AT_ONCE
        ):
            batch = self._next_batch()
            if batch:
                task = asyncio.create_task(self._put(batch))
                self._tasks.add(task)
                task.add_done_callback(self._put_ended)
        self._waiting.set_idle(not self._tasks and not (self._waiting and self._client.available))

    def _put_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a put into the pool failed", exc_info=error)
        self._start_puts()

    def _next_batch(self) -> list[Block[bytes]]:
        """The next blocks to put, held so that they are not evicted before their task runs."""
        batch: list[Block[bytes]] = []
        n_bytes = 0
        while self._waiting and len(batch) < MAX_BATCH_BLOCKS:
            key = self._waiting.first()
            block = self._dram.get(key)
            if block is None or block.n_bytes + HEADER_BYTES > self._client.options.max_value_bytes:
                self._waiting.discard(key)
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
                    self.on_put(block, None)  # another node has put it and watches it
            if left:
                await self._put_missing(left)
        except Unavailable as error:
            log.info("%d blocks not put into the pool: %s", len(left), error)
            self._retry([block.key for block in left])
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
                hint = None if before is None else ValueOrigin(before, putter)
                proof = proof_of(block.key, block.n_bytes, block.value, self._dram.checksum)
                header = partial(pack_header, block.key, block.n_bytes, hint=hint, proof=proof)
                copies.append((to, self._dram.address_of(block.slot), block.n_bytes, header))
            await asyncio.to_thread(_copy, copies)
        except BaseException:
            self._client.release(staged, "agent")
            raise
        finally:
            self._client.release(staged, "caller")
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
            self._retry(again)

    def _before(self, block: Block[bytes]) -> bytes | None:
        """The preceding block in the block's chain, if known."""
        location = self._dram.table.policy(block.slot.slot_bytes).location(block.key)
        return None if location is None else location[0]

    def _retry(self, keys: Sequence[bytes]) -> None:
        if self._closing:
            return
        for key in keys:
            tries = self._tries.get(key, 0) + 1
            if self._client.available:  # else the pool is at fault
                self._tries[key] = tries
            if tries >= TRIES:
                self._waiting.discard(key)
            else:
                self._waiting.add(key)
        if self._retry_timer is None:
            tries = max((self._tries.get(key, 0) for key in keys), default=0)
            self._retry_timer = asyncio.get_running_loop().call_later(RETRY_S * 2**tries, self._resume)

    def _resume(self) -> None:
        self._retry_timer = None
        self._start_puts()

    def _clear_tries(self, key: bytes) -> None:
        self._tries.pop(key, None)


def _copy(copies: Sequence[tuple[int, int, int, Callable[[bytes], bytes]]]) -> None:
    """Write each (to, from, bytes, header of the plain checksum): header and payload to the destination."""
    for to, source, n_bytes, header in copies:
        ctypes.memmove(to + HEADER_BYTES, source, n_bytes)
        ctypes.memmove(to, header(checksum_at(to + HEADER_BYTES, n_bytes)), HEADER_BYTES)

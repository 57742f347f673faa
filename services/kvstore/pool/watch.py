"""Periodic list of the pool's values, and removal of copies that no prompt can match."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from services.kvstore.pool.adoption import BlockAdoption
from services.kvstore.pool.agent_client import AgentClient
from services.kvstore.pool.inventory import Inventory
from services.kvstore.pool.value import HEADER_BYTES, read_hint
from services.kvstore.unreachable.watch import UnreachableWatch
from slipstream.errors import Unavailable

log = logging.getLogger(__name__)

LIST_EVERY_S = 2.0
# Largest part of the time that lists may take; a long list is requested less often.
LIST_PART = 0.05
LIST_S = 12.0
DROP_S = 10.0
HEADERS_S = 2.5


class PoolWatchOwner(Protocol):
    """The node that watches the pool."""

    def is_usable(self, key: bytes) -> bool:
        """Whether the pool or this node has the block."""
        ...

    def dropped(self, keys: Sequence[bytes]) -> None:
        """The watch dropped these blocks from the pool."""
        ...


class PoolWatch:
    """Keeps the inventory current and drops unreachable copies. Event loop only."""

    def __init__(self, client: AgentClient, inventory: Inventory, owner: PoolWatchOwner) -> None:
        self._client = client
        self._inventory = inventory
        self._owner = owner
        self.unreachable = UnreachableWatch(self)
        self.adoption = BlockAdoption(self.unreachable)
        self.has_listed = False  # a whole list has arrived, and none has failed since
        self._needs_whole_list = True
        self._list_is_complete = False
        self._problem = ""
        self._task: asyncio.Task[None] | None = None

    def is_present(self, key: bytes) -> bool:
        """Whether the inventory has the block."""
        return key in self._inventory

    def is_usable(self, key: bytes) -> bool:
        """Whether the pool or this node has the block."""
        return self._owner.is_usable(key)

    def is_spared(self, key: bytes) -> bool:
        """Never: what is unreachable in the pool is dropped there."""
        return False

    def start(self) -> None:
        """Start the task; needs a running loop."""
        self._task = asyncio.create_task(self._watch(), name="pool-watch")

    def clear(self) -> None:
        """Reset all state because the pool is unavailable."""
        self._needs_whole_list, self._list_is_complete, self.has_listed = True, False, False
        self._inventory.clear()
        self.unreachable.clear()

    async def close(self) -> None:
        """End the task. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun_s = loop.time()
            more = False
            if self._client.available:
                try:
                    more = await self.update_inventory()
                    if self._list_is_complete:
                        await self.drop_unreachable(now_s=loop.time())
                        await self.adopt_blocks()
                except Unavailable as error:
                    log.info("pool: %s", error)
                except Exception:  # a defect: the next list may work
                    log.exception("pool: invalid list")
            took_s = loop.time() - begun_s
            await asyncio.sleep(0 if more else max(LIST_EVERY_S, took_s / LIST_PART))

    async def update_inventory(self) -> bool:
        """Request the next list; returns whether more parts follow. Raises Unavailable."""
        number, whole = self._inventory.request_list(), self._needs_whole_list
        # If this list fails, the agent's differences are lost, and the next list must be whole.
        self._needs_whole_list, self._list_is_complete = True, False
        try:
            answer = await self._client.call("list", timeout_s=LIST_S, whole=whole)
        except Unavailable:
            self._inventory.list_failed()
            self.has_listed = False
            raise
        if not self._client.available or not self._inventory.is_current(number):
            return False  # the pool is unavailable, or was meanwhile
        problem = answer.get("list_error", "")
        if problem != self._problem:
            self._problem = problem
            if problem:
                log.warning("pool: its master does not list what it holds: %s", problem)
        if problem:
            self._inventory.list_failed()
            self.has_listed = False
            return False
        new, gone = ([bytes.fromhex(key) for key in answer[name]] for name in ("new", "gone"))
        more = bool(answer["more"])
        self.adoption.set_members(answer.get("segments", ()), own=self._client.segment)
        self._inventory.apply_list(number, new=new, gone=gone, whole=whole, last=not more)
        self.adoption.discard_hints(gone)
        self._needs_whole_list, self._list_is_complete = False, not more
        self.has_listed |= not more
        return more

    async def adopt_blocks(self) -> None:
        """Watch some more of the blocks whose putter has left. Raises Unavailable."""
        wanted = self.adoption.poll(self._inventory.keys)
        if not wanted:
            return
        staged = await self._client.stage([HEADER_BYTES] * len(wanted), timeout_s=HEADERS_S)
        try:
            answer = await self._client.call(
                "headers",
                timeout_s=HEADERS_S,
                staged=staged,
                keys=[key.hex() for key in wanted],
                at=[extent.offset for extent in staged.extents],
            )
            for key, extent, arrived in zip(wanted, staged.extents, answer["arrived"], strict=True):
                if arrived:
                    header = self._client.memory.view(extent.offset, HEADER_BYTES)
                    self.adoption.add_hint(key, read_hint(header, key))
        finally:
            self._client.release(staged, "caller")

    async def drop_unreachable(self, *, now_s: float) -> None:
        """Drop the blocks that stayed unreachable. Raises Unavailable."""
        if not self._inventory.knows_all:  # an unknown block may be a predecessor
            self.unreachable.clear()
            return
        due = self.unreachable.poll(now_s=now_s)
        if not due:
            return
        await self._client.call("drop", timeout_s=DROP_S, keys=[key.hex() for key in due])
        self.unreachable.dropped(due, now_s=now_s)
        self.adoption.discard_hints(due)
        self._inventory.remove(due)
        self._owner.dropped(due)
        log.info("pool: %d blocks dropped: their predecessors are in no tier", len(due))

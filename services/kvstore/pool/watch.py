"""Asks the pool's master what there is, every now and then, and looks for copies that nobody can use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from services.kvstore.policy.orphan_watch import OrphanWatch
from services.kvstore.pool.agent_client import AgentClient
from services.kvstore.pool.inventory import Inventory
from services.kvstore.pool.owner_failover import OwnerFailover
from services.kvstore.pool.value import HEADER_BYTES, open_hint
from slipstream.errors import Unavailable

log = logging.getLogger(__name__)

LIST_EVERY_S = 2.0
# A long list is asked for less often: this part of the time at most.
LIST_PART = 0.05
LIST_S = 12.0
DROP_S = 10.0
HEADS_S = 2.5


class PoolWatch:
    """Event loop only."""

    def __init__(
        self,
        client: AgentClient,
        contents: Inventory,
        *,
        is_usable: Callable[[bytes], bool],
        on_dropped: Callable[[Sequence[bytes]], None],
    ) -> None:
        """`is_usable`: a block is in the pool or in a tier of this node; `on_dropped`: these were orphans."""
        self._client = client
        self._contents = contents
        self._on_dropped = on_dropped
        self.orphans = OrphanWatch(is_present=contents.__contains__, is_usable=is_usable)
        self.adoption = OwnerFailover(
            is_watched=self.orphans.__contains__, adopt=self.orphans.put, release=self.orphans.forget
        )
        self.has_listed = False  # all there is, and nothing went wrong since
        self._whole = True
        self._listed = False
        self._problem = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; needs a running loop."""
        self._task = asyncio.create_task(self._watch(), name="pool-watch")

    def clear(self) -> None:
        """The pool is away."""
        self._whole, self._listed, self.has_listed = True, False, False
        self._contents.clear()
        self.orphans.clear()

    async def close(self) -> None:
        """End; idempotent."""
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
                    more = await self.list_once()
                    if self._listed:
                        await self.drop_orphans(now_s=loop.time())
                        await self.adopt()
                except Unavailable as error:
                    log.info("pool: %s", error)
                except Exception:  # a defect: the next list may be understood
                    log.exception("pool: its list was not understood")
            took_s = loop.time() - begun_s
            await asyncio.sleep(0 if more else max(LIST_EVERY_S, took_s / LIST_PART))

    async def list_once(self) -> bool:
        """Ask for a list; whether there is more of it. Raises Unavailable."""
        number, whole = self._contents.ask(), self._whole
        self._whole, self._listed = True, False  # what was told once and got lost is not told again
        try:
            answer = await self._client.call("list", timeout_s=LIST_S, whole=whole)
        except Unavailable:
            self._contents.unlisted()
            self.has_listed = False
            raise
        if not self._client.available or not self._contents.awaits(number):
            return False  # the pool is, or was, away
        problem = answer.get("unlisted", "")
        if problem != self._problem:
            self._problem = problem
            if problem:
                log.warning("pool: its master does not list what it holds: %s", problem)
        if problem:
            self._contents.unlisted()
            self.has_listed = False
            return False
        new, gone = ([bytes.fromhex(key) for key in answer[name]] for name in ("new", "gone"))
        more = bool(answer["more"])
        self.adoption.members(answer.get("segments", ()), own=self._client.segment)
        self._contents.listed(number, new=new, gone=gone, whole=whole, last=not more)
        self.adoption.forget(gone)
        self._whole, self._listed = False, not more
        self.has_listed |= not more
        return more

    async def adopt(self) -> None:
        """Look after some more of the blocks that nobody living has put. Raises Unavailable."""
        wanted = self.adoption.look(self._contents.keys)
        if not wanted:
            return
        staged = await self._client.stage([HEADER_BYTES] * len(wanted), timeout_s=HEADS_S)
        try:
            answer = await self._client.call(
                "heads",
                timeout_s=HEADS_S,
                staged=staged,
                keys=[key.hex() for key in wanted],
                at=[extent.offset for extent in staged.extents],
            )
            for key, extent, arrived in zip(wanted, staged.extents, answer["arrived"], strict=True):
                if arrived:
                    header = self._client.memory.view(extent.offset, HEADER_BYTES)
                    self.adoption.learnt(key, open_hint(header, key))
        finally:
            self._client.done_with(staged, "caller")

    async def drop_orphans(self, *, now_s: float) -> None:
        """Drop those that stayed orphans. Raises Unavailable."""
        if not self._contents.knows_all:  # what is before a block may be among the others
            self.orphans.clear()
            return
        due = self.orphans.look(now_s=now_s)
        if not due:
            return
        await self._client.call("drop", timeout_s=DROP_S, keys=[key.hex() for key in due])
        self.orphans.dropped(due, now_s=now_s)
        self.adoption.forget(due)
        self._contents.missed(due)
        self._on_dropped(due)
        log.info("pool: %d blocks dropped: what is before them is nowhere", len(due))

"""Staged copies of a worker's pages for peers, so that no peer can write to the pages themselves.

The staging memory is registered with the transport, and with Mooncake a process that reaches its port may
write there. The checksum of a copy is that of the private page, so that its reader finds such a write. With
`direct` registration the pages themselves are registered, and no reader finds a write into them.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from libs.common.transport.base import KvTransport
from libs.common.transport.registered_memory import PageAlignedMemory
from libs.planner.fit import Staging
from libs.worker.engine.page_memory import PageMemory
from slipstream.errors import FailedPrecondition, TransferError

STAGED, DIRECT = REGISTRATIONS = ("staged", "direct")
MIN_STAGED_PAGES = 64
# More bytes than this are copied in another thread than the event loop's.
_INLINE_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class ExportedPage:
    """Where peers read a page, and the checksum of the page itself. `slot`: of the staged copy, if any."""

    address: int
    checksum: bytes
    slot: int | None = None


class PageExporter:
    """Exports of one worker. Event loop only."""

    def __init__(
        self,
        memory: PageMemory,
        transport: KvTransport,
        *,
        registration: str = STAGED,
        staging_bytes: int | None = None,
    ) -> None:
        """Registers the memory. `staging_bytes`: what the planner counts for None.

        Raises FailedPrecondition where this transport or memory needs direct registration.
        """
        self._memory = memory
        self.page_bytes = memory.page_bytes
        self.n_pages = memory.n_pages
        self._waiting: set[asyncio.Event] = set()
        self.n_exported = 0
        self.n_slots = 0
        self.staging: PageAlignedMemory | None = None  # with `staged` registration
        self._free: list[int] = []  # a heap
        if registration == DIRECT:
            transport.register(memory.memory)
            return
        try:
            transport.add_destination(memory.memory)
        except TransferError as error:
            raise FailedPrecondition(
                f"{error.message}: --kv-registration direct allows that, and lets any process that reaches "
                "the transport's ports write to live KV"
            ) from None
        self.n_slots = _n_slots(memory, staging_bytes)
        self._free = list(range(self.n_slots))
        self.staging = PageAlignedMemory(self.n_slots * memory.page_bytes, field="kv_staging_bytes")
        transport.register(self.staging.buffer)

    @property
    def staged_bytes(self) -> int:
        """Bytes of staged copies that are not released."""
        return (self.n_slots - len(self._free)) * self.page_bytes

    async def export(self, pages: Sequence[int], *, is_read: bool = False) -> list[ExportedPage]:
        """Export the leading pages for which there is room, maybe none. Pages must not change meanwhile.

        `is_read`: a reader waits for them. Other exports leave half of the staging memory to such readers.
        The caller releases the result.
        """
        slots: list[int | None] = [None] * len(pages)
        if self.n_slots:
            room = len(self._free) - (0 if is_read else self.n_slots // 2)
            pages = pages[: max(0, room)]
            slots = [heapq.heappop(self._free) for _ in pages]
        self.n_exported += len(pages)
        is_at_once = self._memory.is_on_host and self._memory.is_complete
        if is_at_once and len(pages) * self.page_bytes <= _INLINE_BYTES:
            return self._copied(pages, slots)
        copying = asyncio.get_running_loop().run_in_executor(None, self._copied, pages, slots)
        try:
            return await asyncio.shield(copying)
        except BaseException:  # the thread may still write to the slots
            copying.add_done_callback(lambda _: self._free_slots(slots))
            raise

    def release(self, exported: Sequence[ExportedPage]) -> None:
        """Free the staged copies. Reads of them that still run then find a wrong checksum."""
        self._free_slots([page.slot for page in exported])

    async def wait_for_room(self, changed: asyncio.Event) -> None:
        """Wait until exports are released, or the caller sets `changed`, which it cleared before."""
        self._waiting.add(changed)
        try:
            await changed.wait()
        finally:
            self._waiting.discard(changed)

    def _copied(self, pages: Sequence[int], slots: Sequence[int | None]) -> list[ExportedPage]:
        self._memory.collect(pages)
        return [self._copy(page, slot) for page, slot in zip(pages, slots, strict=True)]

    def _copy(self, page: int, slot: int | None) -> ExportedPage:
        if self.staging is None or slot is None:
            return ExportedPage(self._memory.address_of(page), self._memory.checksum(page))
        address = self.staging.address + slot * self.page_bytes
        return ExportedPage(address, self._memory.copy(page, address), slot)

    def _free_slots(self, slots: Sequence[int | None]) -> None:
        for slot in slots:
            if slot is not None:
                heapq.heappush(self._free, slot)
        for waiting in self._waiting:
            waiting.set()


def _n_slots(memory: PageMemory, staging_bytes: int | None) -> int:
    if staging_bytes is None:
        planned_bytes = Staging().n_bytes(memory.n_pages * memory.page_bytes)
        staging_bytes = max(MIN_STAGED_PAGES * memory.page_bytes, planned_bytes)
    return max(1, min(staging_bytes // memory.page_bytes, memory.n_pages))

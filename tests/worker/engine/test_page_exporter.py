"""PageExporter: copies of pages, bounded and released, and no page that a peer can write to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from libs.common.checksum import KvChecksum, memory_at
from libs.common.transport.base import Region, TransferRefused
from libs.common.transport.registered_memory import PAGE_BYTES, PageAlignedMemory
from libs.worker.engine import page_exporter
from libs.worker.engine.page_exporter import DIRECT, STAGED, ExportedPage, PageExporter
from libs.worker.engine.page_memory import PageMemory
from slipstream.errors import FailedPrecondition

KEYED = KvChecksum(b"key")
N_PAGES = 8


class RecordingTransport:
    """Records what peers can reach, and what is a destination only."""

    def __init__(self, refusal: str = "") -> None:
        self.exposed: list[Region] = []
        self.private: list[Region] = []
        self._refusal = refusal

    def register(self, buffer: memoryview) -> Region:
        self.exposed.append(region_of(buffer))
        return self.exposed[-1]

    def add_destination(self, buffer: memoryview) -> Region:
        if self._refusal:
            raise TransferRefused(self._refusal)
        self.private.append(region_of(buffer))
        return self.private[-1]


def region_of(buffer: memoryview) -> Region:
    import ctypes

    return Region(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), buffer.nbytes)


@pytest.fixture
def pages() -> PageMemory:
    memory = PageAlignedMemory(N_PAGES * PAGE_BYTES)
    memory.view(0, memory.n_bytes)[:] = bytes(at // PAGE_BYTES + at % 7 for at in range(memory.n_bytes))
    info = SimpleNamespace(page_bytes=PAGE_BYTES, n_pages=N_PAGES)
    engine: Any = SimpleNamespace(
        info=info, memory=memory.buffer, memory_address=memory.address, page_parts=None
    )
    return PageMemory(engine, KEYED)


def exporter_of(pages: PageMemory, n_slots: int, **more: Any) -> tuple[PageExporter, RecordingTransport]:
    transport = RecordingTransport()
    made: Any = transport
    return PageExporter(pages, made, staging_bytes=n_slots * PAGE_BYTES, **more), transport


def bytes_at(page: ExportedPage) -> bytes:
    return bytes(memory_at(page.address, PAGE_BYTES))


async def test_peers_reach_copies_only(pages: PageMemory) -> None:
    exporter, transport = exporter_of(pages, 4)
    (exposed,) = transport.exposed
    assert not exposed.overlaps(pages.address, N_PAGES * PAGE_BYTES)
    assert transport.private == [Region(pages.address, N_PAGES * PAGE_BYTES)]
    exported = await exporter.export([5, 2], is_read=True)
    assert [bytes_at(page) for page in exported] == [bytes(pages.page(5)), bytes(pages.page(2))]
    assert all(exposed.contains(page.address, PAGE_BYTES) for page in exported)
    assert [page.checksum for page in exported] == [pages.checksum(5), pages.checksum(2)]
    memory_at(exported[0].address, 1)[0] ^= 1  # a peer writes
    assert KEYED.at(exported[0].address, PAGE_BYTES) != exported[0].checksum == pages.checksum(5)


async def test_copies_are_bounded_and_half_of_them_wait_for_readers(pages: PageMemory) -> None:
    exporter, _ = exporter_of(pages, 4)
    lent = await exporter.export([0, 1, 2])
    assert len(lent) == 2 and exporter.staged_bytes == 2 * PAGE_BYTES
    assert await exporter.export([2]) == []
    read = await exporter.export([2, 3, 4], is_read=True)
    assert len(read) == 2 and await exporter.export([4], is_read=True) == []
    changed = asyncio.Event()
    waiting = asyncio.create_task(exporter.wait_for_room(changed))
    await asyncio.sleep(0)
    assert not waiting.done()
    exporter.release(lent)
    await waiting
    assert len(await exporter.export([4], is_read=True)) == 1
    exporter.release(read)
    assert exporter.staged_bytes == PAGE_BYTES


async def test_a_cancelled_export_frees_its_slots_once_the_copy_has_ended(
    pages: PageMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, _ = exporter_of(pages, 4)
    monkeypatch.setattr(page_exporter, "_INLINE_BYTES", 0)  # copies run in a thread
    copy, copying, go_on = pages.copy, threading.Event(), threading.Event()

    def slow(page: int, address: int) -> bytes:
        copying.set()
        assert go_on.wait(60)
        return copy(page, address)

    monkeypatch.setattr(pages, "copy", slow)
    exporting = asyncio.create_task(exporter.export([1], is_read=True))
    assert await asyncio.to_thread(copying.wait, 60)
    exporting.cancel()
    await asyncio.wait({exporting}, timeout=60)
    assert exporting.cancelled() and exporter.staged_bytes == PAGE_BYTES
    go_on.set()
    async with asyncio.timeout(60):
        while exporter.staged_bytes:
            await asyncio.sleep(0.001)


async def test_direct_registration_exposes_the_pages_themselves(pages: PageMemory) -> None:
    exporter, transport = exporter_of(pages, 4, registration=DIRECT)
    assert transport.exposed == [Region(pages.address, N_PAGES * PAGE_BYTES)] and not transport.private
    exported = await exporter.export(range(N_PAGES))
    assert exported == [ExportedPage(pages.address_of(p), pages.checksum(p)) for p in range(N_PAGES)]
    exporter.release(exported)
    assert exporter.staged_bytes == 0


def test_a_transport_that_needs_direct_registration_is_refused_with_the_flag(pages: PageMemory) -> None:
    transport: Any = RecordingTransport("over rdma into registered memory only")
    with pytest.raises(FailedPrecondition, match=r"over rdma .*--kv-registration direct"):
        PageExporter(pages, transport, registration=STAGED)
    assert not transport.exposed


@pytest.mark.parametrize(("asked", "n_slots"), [(None, N_PAGES), (PAGE_BYTES, 1), (1, 1), (1 << 30, N_PAGES)])
def test_the_staging_memory_holds_one_page_at_least(
    pages: PageMemory, asked: int | None, n_slots: int
) -> None:
    transport: Any = RecordingTransport()
    assert PageExporter(pages, transport, staging_bytes=asked).n_slots == n_slots


class Parts:
    """Separate memories whose pages are in the host's only once they are collected."""

    def __init__(self, pages: PageMemory) -> None:
        self.collected: list[int] = []
        self._pages = pages

    def collect(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._pages.page(page)[:] = bytes([100 + page]) * PAGE_BYTES
        self.collected += pages


@pytest.mark.parametrize("registration", [STAGED, DIRECT])
@pytest.mark.parametrize("asked", [[3], [1, 4, 2]])
async def test_pages_of_separate_memories_are_collected_before_peers_read_them(
    pages: PageMemory, registration: str, asked: list[int]
) -> None:
    parts = Parts(pages)
    pages._parts = parts  # type: ignore[assignment]
    exporter, _ = exporter_of(pages, N_PAGES, registration=registration)
    exported = await exporter.export(asked, is_read=True)
    assert parts.collected == asked
    assert [bytes_at(page) for page in exported] == [bytes([100 + page]) * PAGE_BYTES for page in asked]
    assert [page.checksum for page in exported] == [KEYED.at(page.address, PAGE_BYTES) for page in exported]

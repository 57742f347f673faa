"""BlockFetcher: joined reads, verified blocks, and no reuse of quarantined pages."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.checksum import checksum
from libs.common.telemetry.counters import Counters
from libs.common.transport.base import ReadOp
from libs.common.transport.registered_memory import PageAlignedMemory
from libs.common.transport.socket import SocketTransport
from libs.engine.core.fake import build_fake_engine
from libs.worker.engine.engine_thread import EngineThread
from libs.worker.engine.page_memory import PageMemory
from libs.worker.process.core import WorkerCore
from libs.worker.process.identity import worker_fingerprint
from libs.worker.restore.block_fetcher import BlockFetcher, FetchStats, RemoteBlock, merge_reads
from slipstream.errors import DataCorrupt
from tests.support.host_memory import host_memory
from tests.worker.engine.test_engine_thread import Listener, spec
from tests.worker.nodes import eventually


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
def test_joined_reads_copy_the_same_bytes(pairs: list[tuple[int, int]]) -> None:
    reads = [ReadOp(100 * local, 100 * remote, 100) for local, remote in pairs]
    merged = merge_reads(reads, at_most_bytes=400)

    def copies(ops: Sequence[ReadOp]) -> list[tuple[int, int]]:
        return [(o.local_address + i, o.remote_address + i) for o in ops for i in range(0, o.n_bytes, 100)]

    assert copies(merged) == copies(reads)
    assert all(
        a.local_address + a.n_bytes != b.local_address
        or a.remote_address + a.n_bytes != b.remote_address
        or a.n_bytes + b.n_bytes > 400
        for a, b in itertools.pairwise(merged)
    )


async def test_a_wrong_checksum_is_refused_and_the_blocks_before_it_count() -> None:
    thread = EngineThread(lambda: build_fake_engine(n_pages=8, block_tokens=4), Listener())
    await thread.start()
    memory = await thread.call(PageMemory)
    peer, own = SocketTransport(), SocketTransport()
    source = PageAlignedMemory(8 * memory.page_bytes)
    source.view(0, source.n_bytes)[:] = bytes(i % 251 for i in range(source.n_bytes))
    peer.register(source.buffer)
    own.register(memory.memory)
    counters = Counters()
    fetcher = BlockFetcher(own, memory, thread, counters, batch_bytes=2 * memory.page_bytes)
    size = memory.page_bytes
    blocks = [
        RemoteBlock(page, source.address + page * size, checksum(source.view(page * size, size)))
        for page in range(6)
    ]
    stats = FetchStats()
    await fetcher.pull(peer.session_id, blocks, stats)
    assert (stats.n_blocks, stats.n_bytes) == (6, 6 * size)
    assert bytes(host_memory(memory)[: 6 * size]) == bytes(source.view(0, 6 * size))
    blocks[3] = RemoteBlock(3, blocks[3].address, bytes(16))
    stats = FetchStats()
    with pytest.raises(DataCorrupt):
        await fetcher.pull(peer.session_id, blocks, stats)
    assert stats.n_blocks == 3  # includes the blocks before it in the same batch
    assert counters.snapshot()["slipstream_kv_checksum_failures_total"] == 1
    await own.close()
    await peer.close()
    await thread.stop()


class LateTransport(SocketTransport):
    """A transport that reports some memory as quarantined."""

    late: tuple[int, int] | None = None

    def quarantined(self, address: int, n_bytes: int) -> bool:
        return self.late is not None and address < self.late[1] and self.late[0] < address + n_bytes

    @property
    def quarantined_bytes(self) -> int:
        return 0 if self.late is None else self.late[1] - self.late[0]


async def test_quarantined_pages_are_not_reused() -> None:
    thread = EngineThread(lambda: build_fake_engine(n_pages=8, block_tokens=4), Listener())
    await thread.start()
    memory = await thread.call(PageMemory)
    transport = LateTransport()
    fetcher = BlockFetcher(transport, memory, thread, Counters())
    pages = (await thread.call(lambda engine: engine.reserve(spec("a")))).pages
    late = pages[1]
    transport.late = (memory.address_of(late), memory.address_of(late) + 1)
    await fetcher.pin_late_pages(pages)
    await thread.call(lambda engine: engine.release("a"))
    assert thread.ledger.pages_held == 1
    assert fetcher.quarantined_pages == 1
    again = (await thread.call(lambda engine: engine.reserve(spec("b")))).pages
    assert late not in again
    await thread.call(lambda engine: engine.release("b"))
    transport.late = None
    await eventually(lambda: thread.ledger.pages_held == 0)
    await eventually(lambda: fetcher.quarantined_pages == 0)
    await asyncio.gather(transport.close(), thread.stop())


async def test_a_worker_reports_its_quarantined_pages_and_bytes() -> None:
    transport = LateTransport()
    core = WorkerCore(lambda: build_fake_engine(n_pages=8, block_tokens=4), transport, instance="decode-0")
    assert core.measure()["slipstream_kv_quarantined_pages"] == 0  # the figures of a core that is not open
    await core.open(lambda info: worker_fingerprint(info, None), max_waiting=1, max_running=1)
    pages = (await core.thread.call(lambda engine: engine.reserve(spec("a")))).pages
    late = core.memory.address_of(pages[0]), core.memory.address_of(pages[1]) + core.memory.page_bytes
    transport.late = late
    await core.fetcher.pin_late_pages(pages)
    figures = core.measure()
    assert figures["slipstream_kv_quarantined_bytes"] == late[1] - late[0] == 2 * core.memory.page_bytes
    assert figures["slipstream_kv_quarantined_pages"] == 2
    transport.late = None
    await eventually(lambda: core.measure()["slipstream_kv_quarantined_pages"] == 0)
    assert core.measure()["slipstream_kv_quarantined_bytes"] == 0
    await core.close()

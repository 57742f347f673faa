"""KV in CUDA memory: registered, read in both directions, verified. Needs a Mooncake built with CUDA."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch

from libs.common.checksum import checksum
from libs.common.transport.base import ReadOp, Region, TransferRefused
from libs.common.transport.mooncake import MooncakeTransport, built_with_cuda
from libs.common.transport.socket import SocketTransport
from libs.engine.kv.cache import CacheShape, PagedLatentCache
from libs.engine.kv.page_copies import PageCopies
from libs.worker.engine.page_memory import PageMemory

pytestmark = [pytest.mark.gpu, pytest.mark.asyncio(loop_scope="module")]

SHAPE = CacheShape(n_pages=6, n_layers=4, block_tokens=64, width=576, kv_dtype="bfloat16")
READ_S = 60.0


def page_memory(cache: PagedLatentCache) -> PageMemory:
    info = SimpleNamespace(page_bytes=cache.page_bytes, n_pages=cache.shape.n_pages)
    engine: Any = SimpleNamespace(
        info=info,
        memory=cache.memory,
        memory_address=cache.address,
        page_parts=None,
        read_page=PageCopies(cache.memory, cache.page_bytes).read,
    )
    return PageMemory(engine)


def filled(device: str, seed: int) -> PagedLatentCache:
    cache = PagedLatentCache(SHAPE, device=device)
    cache.pages.copy_(torch.randn(cache.pages.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def transports(cuda: str) -> AsyncIterator[tuple[MooncakeTransport, MooncakeTransport]]:
    if not built_with_cuda():
        pytest.fail("the installed Mooncake is built without CUDA", pytrace=False)
    pair = MooncakeTransport(), MooncakeTransport()
    yield pair
    for each in pair:
        await each.close()


def test_the_cache_is_on_the_device_and_reports_its_bytes(cuda: str) -> None:
    cache = PagedLatentCache(SHAPE, device=cuda)
    assert isinstance(cache.memory, torch.Tensor)
    assert cache.memory.device == cache.pages.device == torch.device(cuda)
    assert (cache.memory.data_ptr(), cache.memory.nbytes) == (cache.address, cache.n_bytes)
    assert cache.pages[2].data_ptr() == cache.address + 2 * cache.page_bytes
    assert not cache.memory.any()


async def test_checksums_of_device_pages_equal_those_of_the_host(cuda: str) -> None:
    device, host = page_memory(filled(cuda, 1)), page_memory(filled("cpu", 1))
    pages = range(SHAPE.n_pages)
    assert [device.checksum(page) for page in pages] == [host.checksum(page) for page in pages]


@pytest.mark.parametrize("source_on", ["cpu", "cuda:0"])
@pytest.mark.parametrize("destination_on", ["cpu", "cuda:0"])
async def test_pages_move_between_host_and_device_in_both_directions(
    transports: tuple[MooncakeTransport, MooncakeTransport], source_on: str, destination_on: str
) -> None:
    lender, reader = transports
    source, destination = filled(source_on, 2), PagedLatentCache(SHAPE, device=destination_on)
    assert lender.register(source.memory) == Region(source.address, source.n_bytes, source_on)
    assert reader.register(destination.memory).location == destination_on
    theirs, own = page_memory(source), page_memory(destination)
    size = source.page_bytes
    reads = [ReadOp(own.address_of(5 - page), theirs.address_of(page), size) for page in (1, 4)]
    landed: list[ReadOp] = []
    await reader.read(lender.session_id, reads, timeout_s=READ_S, landed=landed.append)
    assert sorted(landed, key=lambda op: op.local_address) == sorted(reads, key=lambda op: op.local_address)
    found = [own.checksum(page, has_landed=True) for page in (4, 1)]
    assert found == [theirs.checksum(1), theirs.checksum(4)]
    empty = checksum(bytes(size))
    assert [own.checksum(page) for page in (0, 2, 3, 5)] == [empty] * 4  # other pages are unchanged


async def test_a_damaged_device_page_is_found_by_its_checksum(cuda: str) -> None:
    cache = filled(cuda, 3)
    pages = page_memory(cache)
    before = [pages.checksum(0), pages.checksum(1)]
    assert isinstance(cache.memory, torch.Tensor)
    cache.memory[pages.page_bytes + 7] ^= 1
    after = await asyncio.to_thread(lambda: [pages.checksum(0), pages.checksum(1)])
    assert after[0] == before[0]
    assert after[1] != before[1]


async def test_the_socket_transport_refuses_device_memory_with_the_reason(cuda: str) -> None:
    transport = SocketTransport()
    try:
        with pytest.raises(TransferRefused, match="the kernel cannot read cuda:0"):
            transport.register(torch.zeros(4096, device=cuda))
    finally:
        await transport.close()


def test_a_page_is_read_while_a_launched_step_runs(cuda: str) -> None:
    """It waits for the copies before it, and not for the work behind them."""
    cache = filled(cuda, 4)
    assert isinstance(cache.memory, torch.Tensor)
    copies = PageCopies(cache.memory, cache.page_bytes)
    copies.copy([(2, 3)])
    on_device: Any = torch.cuda
    on_device._sleep(2_000_000_000)
    behind = on_device.Event()
    behind.record()
    page = bytes(copies.read(3))
    assert not behind.query(), "the read waited for the launched work"
    assert page == cache.pages[2].view(torch.uint8).cpu().numpy().tobytes()

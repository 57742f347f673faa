"""PageMemory: host pages are read in place, device pages through a copy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from libs.common.checksum import checksum
from libs.common.transport.base import Region
from libs.common.transport.socket import SocketTransport
from libs.engine.kv.cache import CacheShape, PagedLatentCache
from libs.engine.kv.page_copies import PageCopies
from libs.worker.engine.page_memory import PageMemory

SHAPE = CacheShape(n_pages=5, n_layers=2, block_tokens=8, width=24, kv_dtype="bfloat16")
PAGES = [3, 0, 4]


class DeviceTensorStub:
    """A flat tensor whose bytes are readable only in a host copy, like a tensor on a CUDA device."""

    def __init__(self, tensor: torch.Tensor, copied: list[int]) -> None:
        self._tensor, self._copied = tensor, copied
        self.device, self.nbytes = tensor.device, tensor.nbytes
        self.data_ptr, self.is_contiguous = tensor.data_ptr, tensor.is_contiguous

    def __getitem__(self, span: slice) -> DeviceTensorStub:
        return DeviceTensorStub(self._tensor[span], self._copied)

    def cpu(self) -> torch.Tensor:
        self._copied.append(self.nbytes)
        return self._tensor.clone()


def engine_of(cache: PagedLatentCache, memory: Any) -> Any:
    info = SimpleNamespace(page_bytes=cache.page_bytes, n_pages=cache.shape.n_pages)
    read_page = PageCopies(memory, cache.page_bytes).read
    return SimpleNamespace(
        info=info, memory=memory, memory_address=cache.address, read_page=read_page, page_parts=None
    )


@pytest.fixture
def cache() -> PagedLatentCache:
    made = PagedLatentCache(SHAPE)
    made.pages.copy_(torch.randn(made.pages.shape, generator=torch.Generator().manual_seed(3)))
    return made


async def test_checksums_of_device_pages_equal_those_of_a_host_copy(
    cache: PagedLatentCache,
) -> None:
    copied: list[int] = []
    flat = torch.frombuffer(cache.memory, dtype=torch.uint8)
    on_device = PageMemory(engine_of(cache, DeviceTensorStub(flat, copied)))
    on_host = PageMemory(engine_of(cache, cache.memory))
    expected = [checksum(cache.pages[page].view(torch.uint8).numpy().tobytes()) for page in PAGES]
    assert [on_host.checksum(page) for page in PAGES] == expected
    assert not copied
    assert [on_device.checksum(page) for page in PAGES] == expected
    assert copied == [cache.page_bytes] * len(PAGES)  # page by page, and only the requested pages
    assert on_device.checksum(1) == on_host.checksum(1)


@pytest.mark.parametrize("has_landed", [False, True])
async def test_a_landed_page_of_a_device_is_read_behind_the_transport(
    cache: PagedLatentCache, has_landed: bool
) -> None:
    asked: list[tuple[int, bool]] = []
    engine = engine_of(cache, DeviceTensorStub(torch.frombuffer(cache.memory, dtype=torch.uint8), []))

    def read_page(page: int, *, has_landed: bool) -> memoryview:
        asked.append((page, has_landed))
        return memoryview(bytes(cache.page_bytes))

    engine.read_page = read_page
    PageMemory(engine).checksum(2, has_landed=has_landed)
    assert asked == [(2, has_landed)]


async def test_a_worker_registers_the_memory_of_its_cache(cache: PagedLatentCache) -> None:
    transport = SocketTransport()
    try:
        flat = torch.frombuffer(cache.memory, dtype=torch.uint8)
        for memory in (cache.memory, flat):
            pages = PageMemory(engine_of(cache, memory))
            assert transport.register(pages.memory) == Region(cache.address, cache.n_bytes)
            assert pages.address_of(3) == cache.pages[3].data_ptr()
    finally:
        await transport.close()

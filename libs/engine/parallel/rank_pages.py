"""The KV pages of one rank: the shared ones of the host, or a memory of the rank's layers and slots alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from libs.engine.kernels.device import host_buffer, wait_for_device
from libs.engine.kv.cache import CacheShape, PagedLatentCache
from libs.engine.model_spec.kv_share import KvShare
from libs.engine.model_spec.plan import ALL_SLOTS, BatchPlan

# Of the host memory through which pages of a device pass.
_STAGING_BYTES = 32 << 20


class RankPages:
    """`host`: all pages in the layout of one process, which every rank maps.

    Shared pages are `host` itself. Separate ones hold the same page numbers in `own`. `host` has the bytes of
    a page only after a collection, or after a peer wrote them there.
    """

    def __init__(
        self, host: PagedLatentCache, layers: range, share: KvShare, *, separate_on: str | None
    ) -> None:
        """`separate_on`: the device of a separate memory; None: pages are shared."""
        self.host = host
        self.share = share
        self.is_separate = separate_on is not None
        self.own = host
        self.first_layer = layers.start if self.is_separate else 0
        if separate_on is not None:
            self.own = PagedLatentCache(part_shape(host.shape, layers, share), device=separate_on)
        slots = share.slots(host.shape.block_tokens)
        self._first_slot = slots.start
        # The rank's part of each page.
        self._part = host.pages[:, layers.start : layers.stop, slots]
        self._staging: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.own.pages.device

    def plan(self, plan: BatchPlan) -> BatchPlan:
        """The plan of a batch over `host` and the rank's share, as kernels need it for the rank's memory."""
        if not self.is_separate:
            return plan
        offsets = plan.offset_of_row - np.int32(self._first_slot)
        return replace(plan, cache=self.own, share=ALL_SLOTS, offset_of_row=offsets)

    def copy(self, pages: Sequence[int]) -> None:
        """Copy pages within the rank's memory: `pages` alternates sources and targets."""
        for source, target in zip(pages[::2], pages[1::2], strict=True):
            self.own.pages[target] = self.own.pages[source]

    def collect(self, pages: Sequence[int]) -> None:
        """Copy the rank's part of the pages to `host`."""
        for some, staged in self._staged(pages):
            staged.copy_(self.own.pages[some])
            self._part[some] = staged

    def scatter(self, pages: Sequence[int]) -> None:
        """Copy the rank's part of the pages from `host`."""
        for some, staged in self._staged(pages):
            staged.copy_(self._part[some])
            self.own.pages[some] = staged.to(self.device, non_blocking=True)
            wait_for_device(self.device)  # the next pages pass through the same memory

    def _staged(self, pages: Sequence[int]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """The pages in parts, each with host memory of its size."""
        if self._staging is None:
            n_pages = max(1, min(_STAGING_BYTES // self.own.page_bytes, self.own.shape.n_pages))
            shape = (n_pages, *self.own.pages.shape[1:])
            self._staging = host_buffer(shape, self.own.pages.dtype, self.device)
        step = len(self._staging)
        for begin in range(0, len(pages), step):
            some = [int(page) for page in pages[begin : begin + step]]
            yield some, self._staging[: len(some)]


def part_shape(shape: CacheShape, layers: range, share: KvShare) -> CacheShape:
    """The shape of a memory that has some layers and slots of every page."""
    slots = share.slots(shape.block_tokens)
    return replace(shape, n_layers=len(layers), block_tokens=slots.stop - slots.start)

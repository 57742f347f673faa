"""What one pin waits for: its blocks on their way into memory, from the disks and from the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from opentelemetry.trace import Span

from libs.common.enum_names import tier_name
from libs.common.rpc import tracing
from services.kvstore.dram.slots import Block
from services.kvstore.loading.promotion import Promoter, Promotion
from services.kvstore.pool.promotion import PoolPromotion
from services.kvstore.pool.tier import PoolTier
from slipstream.v1.common_pb2 import CacheTier

_NVME, _POOL = CacheTier.CACHE_TIER_NVME, CacheTier.CACHE_TIER_POOL


@dataclass(frozen=True, slots=True)
class _Load:
    tier: CacheTier.ValueType
    arriving: Promotion | PoolPromotion
    n_wanted: int
    span: Span


class LoadGroup:
    """One load for each tier that has some of the blocks. Those that came are let go of at the end of the
    `with` block, but for those taken. Event loop only."""

    def __init__(self, promoter: Promoter | None, pool: PoolTier | None) -> None:
        self._promoter = promoter
        self._pool = pool
        self._loads: list[_Load] = []

    @property
    def from_disk(self) -> bool:
        """Whether some of the blocks come from a disk."""
        return any(load.tier == _NVME for load in self._loads)

    def begin(self, keys: Sequence[bytes], in_pool: Mapping[bytes, int]) -> None:
        """Load these, which are not in memory; `in_pool`: the sizes of those that come from there."""
        sizes = {key: in_pool[key] for key in keys if key in in_pool}
        on_disk = [key for key in keys if key not in sizes]
        if on_disk and self._promoter is not None:
            self._add(_NVME, self._promoter.begin(on_disk), len(on_disk))
        if sizes and self._pool is not None:
            self._add(_POOL, self._pool.begin(sizes), len(sizes))

    async def wait(self, *, until_s: float) -> None:
        """Until all have ended, or the loop's clock says so. They come side by side."""
        loop = asyncio.get_running_loop()
        for load in self._loads:
            await load.arriving.wait(timeout_s=max(0.0, until_s - loop.time()))
            self._end_span(load)

    def take(self, key: bytes) -> tuple[CacheTier.ValueType, Block[bytes]] | None:
        """The block, whose hold is the caller's now, and where it came from; None when it did not come."""
        for load in self._loads:
            if (block := load.arriving.take(key)) is not None:
                return load.tier, block
        return None

    def __enter__(self) -> LoadGroup:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for load in self._loads:
            self._end_span(load)  # where nobody waits any more
            load.arriving.end()

    def _add(self, tier: CacheTier.ValueType, arriving: Promotion | PoolPromotion, n_wanted: int) -> None:
        self._loads.append(_Load(tier, arriving, n_wanted, tracing.begin("load")))

    def _end_span(self, load: _Load) -> None:
        if not load.span.is_recording():
            return
        tracing.annotate(
            load.span,
            tier=tier_name(load.tier),
            wanted_blocks=load.n_wanted,
            blocks=load.arriving.came_blocks,
            bytes=load.arriving.came_bytes,
        )
        load.span.end()

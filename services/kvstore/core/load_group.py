"""The blocks that one pin loads into memory, from the disks and from the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from opentelemetry.trace import Span

from libs.common.telemetry import tracing
from services.kvstore.dram.slots import Block
from services.kvstore.loading.promotion import Promoter, Promotion
from services.kvstore.pool.promotion import PoolPromotion
from services.kvstore.pool.tier import PoolTier
from slipstream.enum_names import CACHE_TIERS
from slipstream.v1.common_pb2 import CacheTier

_NVME, _POOL = CacheTier.CACHE_TIER_NVME, CacheTier.CACHE_TIER_POOL


@dataclass(frozen=True, slots=True)
class _TierLoad:
    tier: CacheTier.ValueType
    pending: Promotion | PoolPromotion
    n_wanted: int
    span: Span


class LoadGroup:
    """One load for each tier that has some of the blocks. Event loop only.

    The end of the `with` block releases all loaded blocks that `pop` has not returned.
    """

    def __init__(self, promoter: Promoter | None, pool: PoolTier | None) -> None:
        self._promoter = promoter
        self._pool = pool
        self._loads: list[_TierLoad] = []

    @property
    def from_disk(self) -> bool:
        """Whether a disk delivers some of the blocks."""
        return any(load.tier == _NVME for load in self._loads)

    def start(self, keys: Sequence[bytes], in_pool: Mapping[bytes, int]) -> None:
        """Load these blocks, which are not in memory. `in_pool`: value sizes of those that the pool has."""
        sizes = {key: in_pool[key] for key in keys if key in in_pool}
        on_disk = [key for key in keys if key not in sizes]
        if on_disk and self._promoter is not None:
            self._add(_NVME, self._promoter.promote(on_disk), len(on_disk))
        if sizes and self._pool is not None:
            self._add(_POOL, self._pool.promote(sizes), len(sizes))

    async def wait(self, *, until_s: float) -> None:
        """Wait until all loads, which run concurrently, have ended or the loop's clock reaches `until_s`."""
        loop = asyncio.get_running_loop()
        for load in self._loads:
            await load.pending.wait(timeout_s=max(0.0, until_s - loop.time()))
            self._end_span(load)

    def pop(self, key: bytes) -> tuple[CacheTier.ValueType, Block[bytes]] | None:
        """The block, with its hold, and the tier it was loaded from; None if it was not loaded."""
        for load in self._loads:
            if (block := load.pending.pop(key)) is not None:
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
            self._end_span(load)  # no caller waits for it any more
            load.pending.close()

    def _add(self, tier: CacheTier.ValueType, pending: Promotion | PoolPromotion, n_wanted: int) -> None:
        self._loads.append(_TierLoad(tier, pending, n_wanted, tracing.begin("load")))

    def _end_span(self, load: _TierLoad) -> None:
        if not load.span.is_recording():
            return
        tracing.annotate(
            load.span,
            tier=CACHE_TIERS.name(load.tier),
            wanted_blocks=load.n_wanted,
            blocks=load.pending.loaded_blocks,
            bytes=load.pending.loaded_bytes,
        )
        load.span.end()

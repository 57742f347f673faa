"""The disks of a node as one store. Each disk is a failure domain, and a block is on one of them.

A disk that is unavailable serves and takes no blocks, a read-only or busy one takes none; the others go on.
The blocks of a disk that comes back are available again.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from services.kvstore.disk.health import DiskState
from services.kvstore.disk.table.block import DiskBlock
from services.kvstore.disk.table.policy import UNKNOWN, BlockOrigin
from services.kvstore.disk.tier import DiskTier
from services.kvstore.policy.quota import NO_TENANT
from slipstream.errors import FailedPrecondition, NotFound

log = logging.getLogger(__name__)

# Blocks that one disk may write at once: two groups and a third that waits, so that the disk never idles.
# A disk at this bound gets no more.
MAX_WRITING_BLOCKS = 96
# The most blocks behind a gap that are reported, where there are several disks.
MAX_TAIL_BLOCKS = 512


class DiskSet:
    """The disks of one node. Event loop only, except `open` and `close`, which block."""

    def __init__(self, tiers: Sequence[DiskTier]) -> None:
        self.tiers = list(tiers)
        self._writes = itertools.count()
        # Receives a block that is on a disk, and its predecessor in the chain, which is on no disk or follows
        # such a gap itself.
        self.on_gap: Callable[[bytes, bytes], None] = lambda key, before: None

    @property
    def max_writing_blocks(self) -> int:
        """Number of blocks that all disks may write at once."""
        return MAX_WRITING_BLOCKS * len(self.tiers)

    @property
    def takes_blocks(self) -> bool:
        """Whether any disk takes blocks now."""
        return any(not tier.read_only for tier in self.tiers)

    def open(self) -> None:
        """Open all disks; one that fails is unavailable until a probe opens it.

        Raises FailedPrecondition for an unusable directory, and closes all disks then.
        """
        try:
            for tier in self.tiers:
                tier.open()
        except BaseException:
            self.close()
            raise

    async def open_async(self) -> None:
        """Open like `open`, without blocking. A disk that hangs, or scans for too long at the start, is
        unavailable.

        Raises FailedPrecondition for an unusable directory, and closes all disks then.
        """
        try:
            async with asyncio.TaskGroup() as opening:
                for tier in self.tiers:
                    opening.create_task(tier.open_async())
        except* FailedPrecondition as errors:
            await asyncio.to_thread(self.close)
            raise errors.exceptions[0] from None

    def start(self) -> None:
        """Start the disks' watches; needs a running loop."""
        for tier in self.tiers:
            tier.start()

    def close(self) -> None:
        """Close all disks after their running calls."""
        for tier in self.tiers:
            tier.close()

    def contains(self, key: bytes) -> bool:
        """Whether an available disk has the block."""
        return any(tier.contains(key) for tier in self.tiers)

    def held(self, chain: Sequence[bytes]) -> list[bool]:
        """Whether an available disk has each block of the chain; much faster than single lookups."""
        found = np.zeros(len(chain), np.bool_)
        for tier in self.tiers:
            if not tier.unavailable:
                found |= tier.table.held(chain)
        answer: list[bool] = found.tolist()
        return answer

    def get(self, key: bytes) -> DiskBlock | None:
        """The block, or None."""
        tier = self.tier_of(key)
        return None if tier is None else tier.table.get(key)

    def keys(self) -> list[bytes]:
        """The hashes of all blocks."""
        return [key for tier in self.tiers for key in tier.table.keys()]  # noqa: SIM118

    def subscribe(self, on_change: Callable[[bytes, bool], None]) -> None:
        """Report every block that a disk stored (True) or lost (False) to `on_change`, at once."""

        def changed(key: bytes, held: bool) -> None:
            if held or not self.contains(
                key
            ):  # a second disk may have a copy, stored while the first was unavailable
                on_change(key, held)

        for tier in self.tiers:
            tier.table.on_change = changed

    def touch(self, chain: Sequence[bytes], *, tenant: bytes = NO_TENANT, now_ms: float = 0.0) -> None:
        """Record that a tenant used the chain's blocks."""
        here = np.zeros(len(chain), np.bool_)
        for tier in self.tiers:
            here |= tier.table.touch(chain, tenant=tenant, now_ms=now_ms)
        if not here.all():
            self._report_gaps(chain, here)

    def watch_gaps(self) -> None:
        """Report the blocks that the tables' evictions cut off; a disk that opens late gets a new table."""
        for tier in self.tiers:
            tier.table.use.on_cut = lambda key, before: self.on_gap(key, before)

    def _report_gaps(self, chain: Sequence[bytes], here: npt.NDArray[np.bool_]) -> None:
        for at in np.flatnonzero(here[1:] & ~here[:-1]).tolist():
            self.on_gap(chain[at + 1], chain[at])
            if len(self.tiers) > 1:  # no disk knows which blocks follow its own on another disk
                tail = here[at + 1 : at + 1 + MAX_TAIL_BLOCKS]
                end = at + 1 + (len(tail) if tail.all() else int(tail.argmin()))
                for before, key in itertools.pairwise(chain[at + 1 : end]):
                    self.on_gap(key, before)

    async def write(
        self, key: bytes, address: int, n_bytes: int, checksum: bytes, origin: BlockOrigin = UNKNOWN
    ) -> bool:
        """Write the block to a disk with room for it; True when it is durable there. As `DiskTier.write`."""
        if self.contains(key):
            return True
        first = next(self._writes)
        order = sorted(
            range(len(self.tiers)),
            key=lambda n: (self.tiers[n].n_writing, (n - first) % len(self.tiers)),
        )
        for number in order:
            tier = self.tiers[number]
            if tier.read_only or tier.n_writing >= MAX_WRITING_BLOCKS:
                continue
            if await tier.write(key, address, n_bytes, checksum, origin):
                if origin.parent is not None and not self.contains(origin.parent):
                    self.on_gap(key, origin.parent)
                return True
        return False

    async def verify(self, key: bytes) -> bool:
        """Verify every disk copy of the block; drops damaged ones and returns False then.

        Raises NotFound, Unavailable.
        """
        found = [
            (tier, block) for tier in self.tiers if not tier.unavailable and (block := tier.table.get(key))
        ]
        if not found:
            raise NotFound("no such block")
        return all([await tier.verify(block) for tier, block in found])

    async def drop(self, key: bytes) -> bool:
        """Drop the block, so that no restart finds it; False if no disk has it."""
        found = [(tier, block) for tier in self.tiers if (block := tier.table.get(key))]
        return any([await tier.drop(block) for tier, block in found])

    def sum(self, figure: Callable[[DiskTier], float]) -> float:
        """The sum of a value over all disks."""
        return sum(figure(tier) for tier in self.tiers)

    def metrics(self) -> dict[str, float]:
        """Metrics of all disks together, by name."""
        return {
            "slipstream_kvstore_blocks_nvme": self.sum(lambda tier: tier.table.n_blocks),
            "slipstream_kvstore_bytes_nvme": self.sum(lambda tier: tier.table.n_bytes),
            "slipstream_kvstore_index_bytes_nvme": self.sum(lambda tier: tier.table.index_bytes),
            "slipstream_kvstore_corrupt_blocks_total": self.sum(lambda tier: tier.corrupt_blocks),
            "slipstream_kvstore_disk_errors_total": self.sum(lambda tier: tier.io_errors),
            "slipstream_kvstore_disk_read_only": self.sum(lambda tier: tier.read_only),
            "slipstream_kvstore_disk_unavailable": self.sum(
                lambda tier: tier.health.state == DiskState.UNAVAILABLE
            ),
            "slipstream_kvstore_evicted_rerequested_nvme_total": self.sum(lambda tier: _rewanted(tier)[0]),
            "slipstream_kvstore_evicted_rerequested_nvme_gap_seconds_total": self.sum(
                lambda tier: _rewanted(tier)[1] / 1e3
            ),
            "slipstream_kvstore_scrubbed_blocks_total": self.sum(lambda tier: tier.scrubbed_blocks),
        }

    def tier_of(self, key: bytes) -> DiskTier | None:
        """The available disk that has the block, or None."""
        return next((tier for tier in self.tiers if tier.contains(key)), None)


def _rewanted(tier: DiskTier) -> tuple[float, float]:
    policy = tier.table.policy
    return policy.rewanted if policy is not None else (0, 0.0)

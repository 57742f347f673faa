"""The Mooncake Store pool as a tier: memory that the nodes share.

No error here fails a request. A block that cannot be fetched in time, or does not verify, is a miss. While
the pool is unavailable, lookups return at once and writes wait for its return.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from services.kvstore.dram.slots import Block
from services.kvstore.dram.tier import DramTier
from services.kvstore.loading.tombstones import Tombstones
from services.kvstore.pool.agent.protocol import CORRUPT, MISSING, UNREACHABLE
from services.kvstore.pool.agent_client import AgentClient
from services.kvstore.pool.config import PoolOptions
from services.kvstore.pool.inventory import Inventory
from services.kvstore.pool.promotion import GET_S, PoolPromoter, PoolPromotion
from services.kvstore.pool.value import HEADER_BYTES
from services.kvstore.pool.watch import PoolWatch
from services.kvstore.pool.writes import PoolWrites
from slipstream.errors import NotFound, Unavailable

# Of one chain, at most so many blocks that this node lacks are looked up in the pool.
MAX_FIND_BLOCKS = 1024
FIND_S = 0.5
DROP_S = 10.0
FLUSH_S = 2.0


class PoolTier:
    """One node's access to the pool. Event loop only."""

    def __init__(self, dram: DramTier, options: PoolOptions, client: AgentClient | None = None) -> None:
        """`client` replaces the one that starts an agent."""
        self.options = options
        self.client = client or AgentClient(options)
        self.inventory = Inventory(now_ms=lambda: time.monotonic() * 1e3)
        # Whether any tier of the node holds a block.
        self.is_held_locally: Callable[[bytes], bool] = lambda key: dram.get(key) is not None
        self._promoter = PoolPromoter(dram, self.client)
        self.writes = PoolWrites(dram, self.client)
        self.writes.on_put = self._block_put
        self.watch = PoolWatch(self.client, self.inventory, self)
        self.client.listener = self

    def use_tombstones(self, drops: Tombstones) -> None:
        """Use the store's tombstones, so that loads do not publish dropped blocks."""
        self._promoter.tombstones = drops

    @property
    def unavailable(self) -> bool:
        """Whether the pool is unreachable, so that its blocks are misses."""
        return not self.client.available

    @property
    def knows_all(self) -> bool:
        """Whether an unknown block is certainly not in the pool. True without `--pool-admin`."""
        listed = self.watch.has_listed and self.inventory.knows_all
        return not self.unavailable and (listed or not self.options.admin)

    @property
    def held_blocks(self) -> int:
        """Number of blocks that running puts hold in memory."""
        return self.writes.held_blocks

    def start(self) -> None:
        """Start the agent and the watch; needs a running loop."""
        self.client.start()
        if self.options.admin:
            self.watch.start()

    def _block_put(self, block: Block[bytes], before: bytes | None) -> None:
        self.inventory.add([block.key])
        if before is not None:
            self.watch.unreachable.put(block.key, before)
            self.watch.adoption.discard_hints([block.key])

    def is_usable(self, key: bytes) -> bool:
        """Whether the pool or this node has the block."""
        return key in self.inventory or self.is_held_locally(key)

    def dropped(self, keys: Sequence[bytes]) -> None:
        """Forget blocks that the watch dropped from the pool."""
        self.writes.discard_known(keys)

    def pool_changed(self) -> None:
        """Handle that the pool became available or unavailable."""
        if not self.client.available:
            self.watch.clear()
        self.writes.state_changed()

    def probe_keys(self) -> list[bytes]:
        """Some of the blocks that this node put, for a probe."""
        return self.writes.probe_sample()

    def probed(self, sizes: Mapping[bytes, int]) -> None:
        """Compare the sizes that a probe found with what this node put."""
        self.writes.reconcile(sizes)

    async def find(self, keys: Sequence[bytes], *, wait_s: float) -> dict[bytes, int]:
        """Value sizes of those of `keys` that the pool has; empty if it does not answer in time.

        Looks up the first MAX_FIND_BLOCKS keys.
        """
        asked = list(dict.fromkeys(keys))[:MAX_FIND_BLOCKS]
        if self.unavailable or not asked or wait_s <= 0:
            return {}
        try:
            answer = await self.client.call(
                "find", timeout_s=min(wait_s, FIND_S), keys=[key.hex() for key in asked]
            )
        except Unavailable:
            return {}
        sizes = dict(zip(asked, answer["sizes"], strict=True))
        missing = [key for key, n_bytes in sizes.items() if not n_bytes]
        self.writes.discard_known(missing)
        self.inventory.record_miss(missing)
        self.inventory.remove(missing)
        self.inventory.add([key for key, n_bytes in sizes.items() if n_bytes])
        return {key: n_bytes for key, n_bytes in sizes.items() if self._fits(n_bytes)}

    def record_request(self, chain: Sequence[bytes]) -> None:
        """Record a request for the blocks of the chain."""
        self.inventory.record_request(chain)

    def promote(self, sizes: Mapping[bytes, int]) -> PoolPromotion:
        """Load blocks that `find` returned, as `PoolPromoter.promote`."""
        return self._promoter.promote(sizes)

    def offer(self, keys: Sequence[bytes]) -> None:
        """Queue blocks in memory for the pool."""
        self.writes.offer(keys)

    async def drop(self, keys: Sequence[bytes] | None) -> int:
        """Drop the blocks, whichever node put them (None: all blocks of the pool); returns how many it had.

        Raises Unavailable.
        """
        self.writes.cancel(keys)
        await self.writes.wait_running(timeout_s=DROP_S)
        self.writes.cancel(keys)
        gone = self.inventory.keys() if keys is None else keys
        self.inventory.remove(gone)
        self.inventory.eviction_stats.discard(gone)
        self.watch.unreachable.discard(gone)
        self.watch.adoption.discard_hints(gone)
        if keys is None:
            answer = await self.client.call("clear", timeout_s=DROP_S)
        else:
            answer = await self.client.call("drop", timeout_s=DROP_S, keys=[key.hex() for key in keys])
        return int(answer["dropped"])

    def known(self) -> list[bytes]:
        """Blocks that this node put and has not seen disappear."""
        return self.writes.known_keys()

    async def verify(self, key: bytes) -> bool:
        """Verify the block's replicas in the pool without keeping the bytes.

        Returns False, and removes the value, when no replica is whole. Raises NotFound and Unavailable.
        """
        if self.unavailable:
            raise Unavailable("the pool is unavailable")
        sizes = (await self.client.call("find", timeout_s=FIND_S, keys=[key.hex()]))["sizes"]
        outcome = sizes[0] if not sizes[0] or self._fits(sizes[0]) else CORRUPT
        if outcome > 0:
            staged = await self.client.stage(sizes, timeout_s=GET_S)
            try:
                at = [extent.offset for extent in staged.extents]
                answer = await self.client.call(
                    "get", timeout_s=GET_S, staged=staged, keys=[key.hex()], at=at, sizes=sizes
                )
            finally:
                self.client.release(staged, "caller")
            outcome = answer["outcome"][0]
        if outcome == UNREACHABLE:
            raise Unavailable("no node of the pool gives the block")
        if outcome > 0:
            return True
        self.writes.discard_known([key])
        self.inventory.remove([key])
        if outcome == MISSING:
            raise NotFound("no such block in the pool")
        await self.client.call("drop", timeout_s=DROP_S, keys=[key.hex()])
        self._promoter.corrupt_blocks += 1
        return False

    def _fits(self, n_bytes: int) -> bool:
        return HEADER_BYTES < n_bytes <= self.options.max_value_bytes

    async def close(self, *, flush_timeout_s: float) -> None:
        """Put queued blocks within the time, let calls end, and end the agent."""
        await self.watch.close()
        if self.client.available:
            await self.writes.flush(timeout_s=min(FLUSH_S, flush_timeout_s))
        await self.writes.close(timeout_s=FLUSH_S)
        await self._promoter.close(timeout_s=FLUSH_S)
        await self.client.close()

    def metrics(self) -> dict[str, float]:
        """Metrics by name."""
        blocks, n_bytes = self.writes.known
        stats = self.inventory.eviction_stats
        return {
            "slipstream_kvstore_blocks_pool": blocks,
            "slipstream_kvstore_bytes_pool": n_bytes,
            "slipstream_kvstore_pool_unavailable": self.unavailable,
            "slipstream_kvstore_inventory_blocks_pool": len(self.inventory),
            "slipstream_kvstore_unreachable_blocks_pool": self.watch.unreachable.blocks,
            "slipstream_kvstore_unreachable_dropped_pool_total": self.watch.unreachable.dropped_blocks,
            "slipstream_kvstore_evicted_rerequested_pool_total": stats.wanted_blocks,
            "slipstream_kvstore_evicted_rerequested_pool_gap_seconds_total": stats.wanted_gap_ms / 1e3,
            "slipstream_kvstore_quarantined_bytes_pool": self.client.quarantined_bytes,
            "slipstream_kvstore_pool_puts_total": self.writes.put_blocks,
            "slipstream_kvstore_pool_puts_dropped_total": self.writes.dropped_blocks,
            "slipstream_kvstore_pool_adopted_blocks_total": self.watch.adoption.adopted_blocks,
            "slipstream_kvstore_pool_failovers_total": self._promoter.failovers,
            "slipstream_kvstore_pool_corrupt_blocks_total": self._promoter.corrupt_blocks,
            "slipstream_kvstore_pool_agent_restarts_total": self.client.restarts,
            "slipstream_kvstore_pool_staged_bytes": self.client.staged_bytes,
        }

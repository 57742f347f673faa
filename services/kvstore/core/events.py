"""What the tiers of this node hold, as KV events: each table tells, nothing is polled."""

from __future__ import annotations

from collections.abc import Collection

from libs.common.kv_events.server import KvEventServicer
from services.kvstore.core.store import BlockStore
from slipstream.v1.common_pb2 import CacheTier


def tell_of_changes(store: BlockStore, events: KvEventServicer) -> None:
    """From now on `events` knows what the store holds, beginning with what it holds now."""

    def tell(tier: CacheTier.ValueType, key: bytes, held: bool) -> None:
        if held:
            events.stored(tier, (key,))
        else:
            events.removed(tier, (key,))

    dram, disk, pool = CacheTier.CACHE_TIER_DRAM, CacheTier.CACHE_TIER_NVME, CacheTier.CACHE_TIER_POOL
    store.dram.table.on_change = lambda key, held: tell(dram, key, held)
    events.stored(dram, store.dram.table.keys())
    if store.disk is not None:
        store.disk.tell_changes(lambda key, held: tell(disk, key, held))
        events.stored(disk, store.disk.keys())
    if store.pool is not None:  # what any node put there, this one can load: so each tells of all

        def tell_of_pool(keys: Collection[bytes], held: bool) -> None:
            (events.stored if held else events.removed)(pool, keys)

        store.pool.contents.on_change = tell_of_pool
        events.stored(pool, store.pool.contents.keys())

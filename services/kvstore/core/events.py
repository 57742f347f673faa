"""KV events of what this node's tiers hold. Each table reports its changes; nothing is polled."""

from __future__ import annotations

from collections.abc import Collection

from libs.common.kv_events.server import KvEventServicer
from services.kvstore.core.store import BlockStore
from slipstream.v1.common_pb2 import CacheTier


def publish_changes(store: BlockStore, events: KvEventServicer) -> None:
    """Publish what the store holds now, and every later change, through `events`."""

    def publish(tier: CacheTier.ValueType, keys: Collection[bytes], held: bool) -> None:
        (events.stored if held else events.removed)(tier, keys)

    dram, disk, pool = CacheTier.CACHE_TIER_DRAM, CacheTier.CACHE_TIER_NVME, CacheTier.CACHE_TIER_POOL
    store.dram.table.on_change = lambda key, held: publish(dram, (key,), held)
    events.stored(dram, store.dram.table.keys())
    if store.disk is not None:
        store.disk.subscribe(lambda key, held: publish(disk, (key,), held))
        events.stored(disk, store.disk.keys())
    if store.pool is not None:  # every node loads what any node put, so each publishes the whole pool
        store.pool.inventory.on_change = lambda keys, held: publish(pool, keys, held)
        events.stored(pool, store.pool.inventory.keys())

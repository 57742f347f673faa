"""What the tiers of this node hold, as KV events: each table tells, nothing is polled."""

from __future__ import annotations

from libs.common.kv_events import KvEventServicer
from services.kvstore.store import BlockStore
from slipstream.v1.common_pb2 import CacheTier


def tell_of_changes(store: BlockStore, events: KvEventServicer) -> None:
    """From now on `events` knows what the store holds, beginning with what it holds now."""

    def tell(tier: CacheTier.ValueType, key: bytes, held: bool) -> None:
        if held:
            events.stored(tier, (key,))
        else:
            events.removed(tier, (key,))

    dram, disk = CacheTier.CACHE_TIER_DRAM, CacheTier.CACHE_TIER_NVME
    store.dram.table.on_change = lambda key, held: tell(dram, key, held)
    events.stored(dram, store.dram.table.keys())
    if store.disk is not None:
        store.disk.tell_changes(lambda key, held: tell(disk, key, held))
        events.stored(disk, store.disk.keys())

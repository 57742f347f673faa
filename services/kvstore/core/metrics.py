"""Metrics of a node's tiers, by name (`libs/common/telemetry/metric_tables/table.py`)."""

from __future__ import annotations

from services.kvstore.core.store import BlockStore
from slipstream.enum_names import EVICTION_POLICIES
from slipstream.v1 import common_pb2, worker_pb2


def tier_metrics(store: BlockStore) -> dict[str, float]:
    """Gauges and counters of all tiers together."""
    table, disk, write_behind = store.dram.table, store.disk, store.write_behind
    on_disk = disk.sum(lambda tier: tier.table.evictions) if disk is not None else 0
    rewanted_blocks, rewanted_gap_ms = table.rewanted
    return {
        "slipstream_kvstore_blocks_dram": table.n_blocks,
        "slipstream_kvstore_bytes_dram": table.n_bytes,
        "slipstream_kvstore_evictions_total": table.evictions + on_disk,
        "slipstream_kvstore_evicted_rerequested_total": rewanted_blocks,
        "slipstream_kvstore_evicted_rerequested_gap_seconds_total": rewanted_gap_ms / 1e3,
        "slipstream_kvstore_policy_changes_total": table.policy_changes,
        "slipstream_kvstore_disk_refused_total": store.admission.refused_blocks,
        "slipstream_kvstore_unreachable_blocks_dram": store.memory_sweep.blocks,
        "slipstream_kvstore_unreachable_dropped_dram_total": store.memory_sweep.dropped_blocks,
        "slipstream_kv_blocks_leaked": store.leaked_blocks,
        "slipstream_kvstore_writes_waiting": write_behind.waiting if write_behind is not None else 0,
        "slipstream_kvstore_writes_dropped_total": (
            write_behind.dropped_blocks if write_behind is not None else 0
        ),
        **_disk_metrics(store),
        **(store.pool.metrics() if store.pool is not None else {}),
    }


def evicted_and_wanted(store: BlockStore) -> tuple[float, float]:
    """(blocks so far, mean bytes of a block) that the last tier evicted and that were wanted then. What an
    earlier tier evicts is still in the last one."""
    if store.pool is not None:
        figures, tier = store.pool.metrics(), "pool"
    elif store.disk is not None:
        figures, tier = store.disk.metrics(), "nvme"
    else:
        table = store.dram.table
        return table.rewanted[0], table.n_bytes / max(table.n_blocks, 1)
    n_blocks = figures[f"slipstream_kvstore_blocks_{tier}"]
    mean_bytes = figures[f"slipstream_kvstore_bytes_{tier}"] / max(n_blocks, 1)
    return figures[f"slipstream_kvstore_evicted_rerequested_{tier}_total"], mean_bytes


def evictions(store: BlockStore) -> list[worker_pb2.TierEviction]:
    """The policies that each tier of the node follows. The pool evicts by itself."""
    followed = map(EVICTION_POLICIES.value, store.dram.table.policies_followed)
    found = [worker_pb2.TierEviction(tier=common_pb2.CACHE_TIER_DRAM, policies=followed)]
    if store.disk is not None:
        reuse = worker_pb2.EVICTION_POLICY_EXPECTED_REUSE
        found.append(worker_pb2.TierEviction(tier=common_pb2.CACHE_TIER_NVME, policies=[reuse]))
    return found


def occupancy(store: BlockStore) -> dict[tuple[str, ...], float]:
    """The share of each tier's bytes that blocks fill. The pool's is not known: nodes share it."""
    used: dict[tuple[str, ...], float] = {}
    used["dram",] = store.dram.table.n_bytes / store.dram.memory.n_bytes
    if store.disk is not None:
        n_bytes = store.disk.sum(lambda tier: tier.table.n_slabs * tier.table.slab_bytes)
        used["nvme",] = store.disk.sum(lambda tier: tier.table.n_bytes) / max(n_bytes, 1)
    return used


def _disk_metrics(store: BlockStore) -> dict[str, float]:
    if store.disk is None or store.disk_sweep is None or store.promoter is None:
        return {}
    return {
        **store.disk.metrics(),
        "slipstream_kvstore_unreachable_blocks_nvme": store.disk_sweep.blocks,
        "slipstream_kvstore_unreachable_dropped_nvme_total": store.disk_sweep.dropped_blocks,
        "slipstream_kvstore_quarantined_bytes_nvme": store.promoter.quarantined_bytes,
    }

"""The disk tier's index: lookups of long chains, memory for each block, and the scan at a start."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from libs.common.checksum import checksum
from libs.common.telemetry.counters import Counters
from services.kvstore.core.store import BlockStore
from services.kvstore.disk.segment_format import BlockHeader, Superblock
from services.kvstore.disk.segments.segment_file import BufferPool, SegmentFile
from services.kvstore.disk.set import DiskSet
from services.kvstore.disk.tier import DiskTier, segment_bytes_for
from services.kvstore.dram.tier import DramTier

CHAIN_BLOCKS = 4000
CHAINS = 4  # looked up in turn
INDEX_BLOCKS = 200_000
SCAN_SEGMENTS = 24
SLOT_BYTES = 64 << 10


def measure_lookup(directory: Path, n_blocks: int = INDEX_BLOCKS, lookups: int = 200) -> dict[str, Any]:
    """A store whose disk has `n_blocks` blocks, the chains among them: ms a lookup, bytes a block."""
    tier = DiskTier(directory, disk_bytes=(n_blocks + 2000) * (SLOT_BYTES + 4096) * 65 // 64)
    table = tier.table
    keys = [checksum(b"block %d" % number) for number in range(n_blocks)]
    chains = [keys[n * CHAIN_BLOCKS : (n + 1) * CHAIN_BLOCKS] for n in range(CHAINS)]
    random.Random(1).shuffle(keys)
    begun = time.perf_counter()
    for generation, key in enumerate(keys):
        slot = table.allocate(SLOT_BYTES, generation=generation)
        assert slot is not None
        table.publish(key, slot, SLOT_BYTES, generation, key)
    publish_s = time.perf_counter() - begun
    store = BlockStore(DramTier(1 << 20), DiskSet([tier]), Counters(), now_ms=lambda: 0.0)
    times = []
    for number in range(lookups):
        chain = chains[number % CHAINS]
        begun = time.perf_counter()
        held = store.lookup_local(chain)
        times.append((time.perf_counter() - begun) * 1e3)
        assert len(held) == CHAIN_BLOCKS
    times.sort()
    tier.close()
    return {
        "chain_blocks": CHAIN_BLOCKS,
        "blocks_on_disk": n_blocks,
        "lookup_p50_ms": round(times[len(times) // 2], 3),
        "lookup_p99_ms": round(times[len(times) * 99 // 100], 3),
        "index_bytes_per_block": round(table.index_bytes / n_blocks, 1),
        "publishes_per_s": round(n_blocks / publish_s),
    }


def measure_scan(directory: Path, n_segments: int = SCAN_SEGMENTS) -> dict[str, Any]:
    """Open a directory whose every slot has a block: headers a second."""
    disk_bytes = n_segments << 26
    tier = DiskTier(directory, disk_bytes=disk_bytes)
    directory.mkdir(parents=True)
    segment_bytes = segment_bytes_for(disk_bytes)
    pool, number = BufferPool(), 0
    for slab in range(n_segments):
        path = tier.files.path(slab)
        file = SegmentFile.create(path, Superblock(slab, segment_bytes, SLOT_BYTES), tier.files.io, pool)
        headers = []
        for _ in range(file.superblock.n_slots):
            number += 1
            key = checksum(b"%d" % number)
            headers.append(BlockHeader(key, SLOT_BYTES - number % 100, number, key).sealed())
        file.write_headers(0, headers)
        file.close()
    times = []
    for _ in range(3):
        tier = DiskTier(directory, disk_bytes=disk_bytes)
        begun = time.perf_counter()
        tier.open()
        times.append(time.perf_counter() - begun)
        assert tier.table.n_blocks == number
        tier.close()
    for path in directory.iterdir():
        path.unlink()
    best_s = sorted(times)[1]
    return {
        "blocks": number,
        "scan_s": round(best_s, 3),
        "blocks_per_s": round(number / best_s),
        "s_per_million_blocks": round(best_s / number * 1e6, 2),
    }

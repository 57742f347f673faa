"""Hit ratio of the disk tier's own table and policy on a trace, beside exact LRU at the same capacity.

    python -m bench.cache.disk --trace conversation_trace.jsonl --json

The same replay as `bench/cache/policy.py`: a request's chain is wanted, its leading held blocks are hits, and
what is missing is stored in the order of the chain. The table samples victims and follows a miniature of the
policy where it has more blocks than that holds. No wall clock enters; `us_a_block` is processor time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from bench.cache.baselines import Lru
from bench.cache.policy import CAPACITIES, hit_ratio, read_trace
from bench.command_line import bench_parser
from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.disk.table.policy import NO_KIND, BlockOrigin
from services.kvstore.disk.table.table import DiskTable


class DiskCache:
    """The disk's table with slots of one page, and no disk."""

    def __init__(self, capacity: int) -> None:
        self.table = DiskTable(n_slabs=1, slab_bytes=capacity * 2 * PAGE_BYTES)
        self._generation = 0

    def serve(self, chain: Sequence[int]) -> int:
        """Want the chain and store what is missing; blocks held at its start."""
        keys = [block.to_bytes(16, "little") for block in chain]
        self.table.touch(keys)
        held = [self.table.contains(key) for key in keys]
        hits = held.index(False) if False in held else len(held)
        for depth, key in enumerate(keys):
            if self.table.contains(key):
                continue
            slot = self.table.allocate(PAGE_BYTES, generation=0)
            if slot is None:
                break
            self._generation += 1
            origin = BlockOrigin(keys[depth - 1] if depth else None, depth, NO_KIND)
            self.table.publish(key, slot, PAGE_BYTES, self._generation, key, origin)
        return hits


def main() -> None:
    """Print a row for each capacity."""
    parser = bench_parser("cache.disk", __doc__)
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines")
    parser.add_argument("--capacity", type=int, action="append", help="in blocks; repeat for several")
    asked = parser.parse_args()
    requests = read_trace(asked.trace)
    rows = []
    for capacity in asked.capacity or CAPACITIES:
        disk, begun = DiskCache(capacity), time.process_time()
        found = hit_ratio(requests, disk)
        took_s = time.process_time() - begun
        policy = disk.table.policy
        assert policy is not None
        rows.append(
            {
                "capacity_blocks": capacity,
                "disk": round(found, 5),
                "lru": round(hit_ratio(requests, Lru(capacity)), 5),
                "sampled_1_in": policy.rate,
                "changes": policy.changes,
                "us_a_block": round(took_s / sum(len(r.chain) for r in requests) * 1e6, 1),
            }
        )
        if not asked.json:
            print(rows[-1], flush=True)
    if asked.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()

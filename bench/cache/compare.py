"""Hit ratios of the memory tier's policy and of plain caches on made loads, as a table or JSON.

    python -m bench.cache.compare --seed 1 --json

Rows are loads and capacities; columns LRU, ARC, S3-FIFO, hit density alone, and the tier. `gap` is what the
tier lacks to the best of the others, `under_lru` what it lacks to LRU, both in percent of the blocks; `lost`
is the gap in capacities of blocks.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

from bench.cache.baselines import Arc, Cache, Lru, S3Fifo
from bench.cache.changing import CHANGING
from bench.cache.policy import Production
from bench.cache.traces import LOADS
from bench.cache.workloads import WORKLOADS
from bench.command_line import bench_parser
from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.policy.adaptive import HIT_DENSITY

CAPACITIES = (300, 1_000, 3_000)
SCALE_BLOCKS = 1_000
ALL_LOADS = {**WORKLOADS, **LOADS, **CHANGING}
COLUMNS = ("lru", "arc", "s3fifo", "hit_density", "adaptive")


class HitDensity(Production):
    """The memory tier when it always follows hit density."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.table.policy(PAGE_BYTES).fix_policy(HIT_DENSITY)


def row(load: str, seed: int, n_requests: int, capacity: int) -> dict[str, float | str]:
    """The hit ratios of one load at one capacity, in percent."""
    chains = ALL_LOADS[load](random.Random(f"{load}{seed}"), n_requests, SCALE_BLOCKS)
    total = sum(map(len, chains))
    caches: list[Cache] = [
        Lru(capacity),
        Arc(capacity),
        S3Fifo(capacity),
        HitDensity(capacity),
        Production(capacity),
    ]
    found = [100 * sum(map(cache.serve, chains)) / total for cache in caches]
    return {
        "load": load,
        "capacity_blocks": capacity,
        "blocks": total,
        **{name: round(value, 2) for name, value in zip(COLUMNS, found, strict=True)},
        "gap": round(max(found[:-1]) - found[-1], 2),
        "under_lru": round(found[0] - found[-1], 2),
        "lost": round((max(found[:-1]) - found[-1]) / 100 * total / capacity, 2),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Print a row for each load and capacity."""
    parser = bench_parser("cache.compare", __doc__)
    parser.add_argument("--load", action="append", choices=ALL_LOADS, help="repeat for several")
    parser.add_argument("--capacity", type=int, action="append", help="in blocks; repeat for several")
    parser.add_argument("--requests", type=int, default=6_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(argv)
    columns = (*COLUMNS, "gap", "under_lru", "lost")
    if not asked.json:
        print("load".ljust(19) + "blocks".rjust(7) + "".join(name.rjust(12) for name in columns))
    for load in asked.load or ALL_LOADS:
        for capacity in asked.capacity or CAPACITIES:
            found = row(load, asked.seed, asked.requests, capacity)
            if asked.json:
                print(json.dumps(found), flush=True)
            else:
                cells = "".join(f"{found[name]:12.2f}" for name in columns)
                print(f"{load:19}{capacity:7,d}{cells}", flush=True)


if __name__ == "__main__":
    main()

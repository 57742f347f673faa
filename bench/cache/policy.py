"""python -m bench.cache.policy --trace FILE: the production eviction policy on a trace, beside others.

A trace has one JSON object a line: timestamp (ms), input_length (tokens), hash_ids (its blocks of 512 tokens,
the last one possibly short). Each request first takes what is held from its start on, then all its
blocks are offered. The token hit ratio is prompt tokens in held leading blocks over all prompt tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.cache.baselines import Arc, Cache, Clairvoyant, Lru, S3Fifo, Unlimited
from bench.command_line import bench_parser
from libs.common.transport.registered_memory import PAGE_BYTES
from services.kvstore.dram.slots import SlotTable

BLOCK_TOKENS = 512
CAPACITIES = (1_000, 3_000, 10_000, 30_000, 100_000)
COLUMNS = ("lru", "s3fifo", "arc", "slipstream", "clairvoyant")


@dataclass(frozen=True, slots=True)
class Request:
    """One line of a trace; `chain` has no block twice."""

    input_tokens: int
    chain: tuple[int, ...]


class Production:
    """The memory tier's table of slots, with its eviction policy and its admission."""

    def __init__(self, capacity: int) -> None:
        self.table: SlotTable[None] = SlotTable(n_slabs=1, slab_bytes=capacity * PAGE_BYTES)
        self.table.policy(PAGE_BYTES)

    def serve(self, chain: Sequence[int]) -> int:
        keys = [block.to_bytes(16, "little") for block in chain]
        missing = [key for key in keys if self.table.get(key) is None]
        hits = next((at for at, key in enumerate(keys) if self.table.get(key) is None), len(keys))
        self.table.touch(keys)
        published = []
        for key in self.table.offer(missing, PAGE_BYTES):
            slot = self.table.allocate(PAGE_BYTES)
            if slot is None:
                break
            self.table.publish(key, slot, PAGE_BYTES, None)
            published.append(key)
        self.table.policy(PAGE_BYTES).chained(published)
        return hits


def read_trace(path: Path) -> list[Request]:
    """The requests of a trace file, in its order. Raises ValueError that names the line."""
    requests: list[Request] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                found = json.loads(line)
                chain = tuple(dict.fromkeys(int(block) for block in found["hash_ids"]))
                requests.append(Request(int(found["input_length"]), chain))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a request: {error}") from None
    return requests


def hit_ratio(requests: Iterable[Request], cache: Cache) -> float:
    """Prompt tokens in leading blocks that the cache had, of all prompt tokens; 0 to 1."""
    hit = total = 0
    for request in requests:
        hit += min(cache.serve(request.chain) * BLOCK_TOKENS, request.input_tokens)
        total += request.input_tokens
    return hit / total if total else 0.0


def caches(capacity: int, requests: Sequence[Request]) -> dict[str, Callable[[], Cache]]:
    """The caches to compare at one capacity, by column."""
    return {
        "lru": lambda: Lru(capacity),
        "s3fifo": lambda: S3Fifo(capacity),
        "arc": lambda: Arc(capacity),
        "slipstream": lambda: Production(capacity),
        "clairvoyant": lambda: Clairvoyant(capacity, [request.chain for request in requests]),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or JSON."""
    parser = bench_parser("cache.policy", __doc__)
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines")
    parser.add_argument("--capacity", type=int, action="append", help="in blocks; repeat for several")
    parsed = parser.parse_args(argv)
    try:
        requests = read_trace(parsed.trace)
    except (OSError, ValueError) as error:
        print(f"cache_policy: {error}", file=sys.stderr)
        return 2
    ceiling = hit_ratio(requests, Unlimited())
    if not parsed.json:
        print(f"{len(requests)} requests, ceiling {100 * ceiling:.1f} % of prompt tokens")
        print("blocks".rjust(9) + "".join(name.rjust(13) for name in COLUMNS) + "of ceiling".rjust(13))
    rows: list[dict[str, float]] = []
    for capacity in parsed.capacity or CAPACITIES:
        row = {name: hit_ratio(requests, make()) for name, make in caches(capacity, requests).items()}
        rows.append({"capacity_blocks": capacity, **{name: round(row[name], 5) for name in COLUMNS}})
        if not parsed.json:
            cells = "".join(f"{100 * row[name]:11.1f} %" for name in COLUMNS)
            share = row["slipstream"] / ceiling if ceiling else 0.0
            print(f"{capacity:9,d}{cells}{100 * share:11.1f} %", flush=True)
    if parsed.json:
        report = {"trace": parsed.trace.name, "requests": len(requests), "ceiling": round(ceiling, 5)}
        print(json.dumps({**report, "token_hit_ratio": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

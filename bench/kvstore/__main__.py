"""The KV store against what the machine gives; both sides of each pair in one run.

    python -m bench.kvstore --json
    python -m bench.kvstore --dir /mnt/nvme --remote --pool

Disk reads and durable puts against raw O_DIRECT (`bench/kvstore/disk.py`), the index and the scan at a
start (`bench/kvstore/index.py`), with `--remote` reads by another process against the bare engine
and a socket (`bench/kvstore/remote.py`), and with `--pool` the same and reads from disk against Mooncake
Store (`bench/kvstore/pool.py`). Ratios are medians of the ratios within a turn.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from bench.command_line import bench_parser
from bench.kvstore import disk as kvstore_disk
from bench.kvstore import index as kvstore_index
from bench.kvstore import pool as kvstore_pool
from bench.kvstore import remote as kvstore_remote


def measure(directory: Path, *, turns: int, remote: bool, pool: bool) -> dict[str, Any]:
    """All sections."""
    shape = kvstore_disk.DiskShape(turns=turns)
    found: dict[str, Any] = {
        "disk": asyncio.run(kvstore_disk.measure(directory, shape)),
        "index": kvstore_index.measure_lookup(directory / "lookup"),
        "start": kvstore_index.measure_scan(directory / "scan"),
    }
    if remote:
        found["remote"] = asyncio.run(kvstore_remote.measure(kvstore_remote.ReadShape()))
    if pool:
        found["pool"] = asyncio.run(kvstore_pool.measure(directory))
    return found


def show(found: dict[str, Any]) -> None:
    """The figures as lines."""
    for row in found["disk"]:
        speed = row["mb_per_s"]
        print(
            f"{row['block_bytes'] >> 10:5} KiB  read {speed['read']:5} of {speed['raw_read']:5} MB/s "
            f"({row['read_to_raw']:.2f}; into plain pages raw is {speed['raw_plain_read']}, "
            f"{row['read_to_raw_plain']:.2f}), "
            f"as chains {speed['read_chain']:5} ({row['read_chain_to_raw']:.2f}), "
            f"four callers' pins of one block {speed['read_4_pins']:5} ({row['read_4_pins_to_raw']:.2f})"
        )
        for name, disk in (("put", "small disk"), ("put_large", "large disk")):
            print(
                f"{'':10} durable put, {disk} {speed[name]:5} of {speed[f'raw_{name}']:5} MB/s "
                f"({row[f'{name}_to_raw']:.2f}), {row[f'{name}_group_blocks']:g} blocks a sync, processor "
                f"{row[f'{name}_cpu_us']:g} us a block, raw {row[f'raw_{name}_cpu_us']:g}"
            )
    index, start = found["index"], found["start"]
    print(
        f"lookup of {index['chain_blocks']} blocks: p50 {index['lookup_p50_ms']} ms, "
        f"p99 {index['lookup_p99_ms']} ms; {index['index_bytes_per_block']} bytes of index a block"
    )
    print(f"start: {start['blocks_per_s']} blocks/s ({start['s_per_million_blocks']} s for a million)")
    for name, value in found.get("remote", {}).items():
        print(f"remote {name}: {value}")
    if "pool" in found:
        kvstore_pool.show(found["pool"])


def main() -> None:
    """Measure and print."""
    parser = bench_parser("kvstore", __doc__)
    parser.add_argument("--dir", type=Path, help="where to write, on the disk to measure; default: temporary")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--remote", action="store_true", help="remote reads too")
    parser.add_argument("--pool", action="store_true", help="remote reads against Mooncake Store too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.dir) as directory:
        found = measure(Path(directory), turns=asked.turns, remote=asked.remote, pool=asked.pool)
    if asked.json:
        print(json.dumps(found))
    else:
        show(found)


if __name__ == "__main__":
    main()

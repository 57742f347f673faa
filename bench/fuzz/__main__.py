"""Memory and statuses of every service under fuzzed inputs, in real processes.

    python -m bench.fuzz --inputs 100000 --json
    python -m bench.fuzz --inputs 2000 --only kvstore

A cluster with the fake engine: router, prefill, decode, kvstore, drafter, etcd. Each process in turn gets
`--inputs` messages: malformed HTTP from a grammar, and protobuf messages that its descriptors make, to all of
its services, with an operator's token. Printed are the statuses, and resident memory when the process is
new, after a tenth as many valid requests, which fill caches and heaps, and after the fuzzed inputs.

Exit status 1: an input was answered with UNKNOWN, INTERNAL or 5xx, or not by HTTP at all; a process ended, or
grew by more than 20 MB by the fuzzed inputs; or something is held that idle processes do not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from bench.command_line import bench_parser, print_report
from bench.fuzz.targets import Target, targets
from bench.ledgers import wait_until_idle
from bench.progress import say
from libs.common.cluster.worker_record import Role
from slipstream.operator_access import operator_dial
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.plan import ClusterConfig
from supervisor.process_stats import resident_bytes

MAX_GROWTH_MB = 20.0
# The longest lease that a message can ask for is 120 s.
_IDLE_S = 150.0
_SHOWN = 10


def fuzzed_config(run_dir: Path) -> ClusterConfig:
    """One process of each service, with the fake engine."""
    engine = ["--engine", "fake"]
    return ClusterConfig(
        run_dir=run_dir,
        prefill=1,
        decode=1,
        drafters=1,
        log_level="warning",
        extra_arguments={
            Role.PREFILL: engine,
            Role.DECODE: engine,
            Role.DRAFTER: engine,
            # The eviction policy remembers capacity + 8,192 blocks at least, 1 KB each, wanted or held. With
            # so little memory that table is the smallest that there is.
            Role.KVSTORE: ["--dram-bytes", str(8 << 20), "--disk-bytes", str(256 << 20)],
        },
    )


class FuzzRun:
    """Fuzzes the targets of one cluster in turn."""

    def __init__(self, cluster: ClusterSupervisor, run_dir: Path) -> None:
        self._cluster = cluster
        self._dial = operator_dial(run_dir)

    async def measure(self, inputs: int, *, only: str, seed: int, lasts_s: float) -> list[dict[str, object]]:
        """A row for each target. Each has an equal part of the time, and may get fewer inputs in it."""
        found = await targets(self._cluster.record(), self._dial, random.Random(seed))
        chosen = [target for target in found if only in target.name]
        rows = []
        for target in chosen:
            rows.append(await self._row(target, inputs, lasts_s / len(chosen)))
            say(json.dumps(rows[-1]))
        for target in found:
            await target.close()
        return rows

    async def _row(self, target: Target, inputs: int, lasts_s: float) -> dict[str, object]:
        problems: list[str] = []
        new_mb = self._resident_mb(target)
        await target.use(inputs // 10)
        await self._until_idle(problems)
        before_mb, n_valid, began_s = self._resident_mb(target), target.n_sent, time.monotonic()
        await target.run(inputs, until_s=began_s + lasts_s)
        fuzzed_s = time.monotonic() - began_s
        await self._until_idle(problems)
        after_mb = self._resident_mb(target)
        process = self._cluster.record().find(target.instance)
        grown_mb = round(after_mb - before_mb, 1)
        n_fuzzed = target.n_sent - n_valid
        return {
            "target": target.name,
            "valid_requests": n_valid,
            "inputs": n_fuzzed,
            "inputs_per_s": round(n_fuzzed / fuzzed_s, 1),
            "rss_mb": {"new": new_mb, "before": before_mb, "after": after_mb},
            "growth_mb": grown_mb,
            "statuses": target.statuses,
            "defects": len(target.defects),
            "defects_shown": target.defects[:_SHOWN],
            "restarts": process.restarts,
            "problems": problems,
            "holds": not (target.defects or process.restarts or problems) and grown_mb <= MAX_GROWTH_MB,
        }

    def _resident_mb(self, target: Target) -> float:
        pid = self._cluster.record().find(target.instance).pid
        return round(resident_bytes(pid) / 1e6, 1) if pid is not None else 0.0

    async def _until_idle(self, problems: list[str]) -> None:
        endpoints = self._cluster.record().service_endpoints()
        await wait_until_idle(endpoints, problems, self._dial, timeout_s=_IDLE_S)


async def run(options: argparse.Namespace) -> dict[str, object]:
    """The whole run."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        run_dir = Path(folder) / "run"
        async with ClusterSupervisor(fuzzed_config(run_dir), say=say) as cluster:
            rows = await FuzzRun(cluster, run_dir).measure(
                options.inputs, only=options.only, seed=options.seed, lasts_s=options.minutes * 60
            )
    return {
        "cores": os.cpu_count(),
        "inputs_each": options.inputs,
        "seed": options.seed,
        "targets": rows,
        "holds": all(row["holds"] for row in rows),
    }


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = bench_parser("fuzz", __doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="to each process")
    parser.add_argument("--minutes", type=float, default=math.inf, help="at most, of inputs to all processes")
    parser.add_argument("--only", default="", help="processes whose name has this text")
    parser.add_argument("--seed", type=int, default=15)
    return parser.parse_args(argv)


def main() -> int:
    """Measure and print."""
    options = parse_options()
    found = asyncio.run(run(options))
    print_report(found, as_json=options.json)
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())

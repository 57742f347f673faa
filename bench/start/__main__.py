"""The cost of starting a local cluster, with forked services and with new interpreters.

    python -m bench.start --json                    # the shipped model, both ways, alternately
    python -m bench.start --rounds 1 --engine fake

`start_s` is the time until the cluster is ready. `start_cpu_s` is the processor time of all its processes
until then, with etcd and the fork servers. `restart_s` and `restart_cpu_s` are those of a killed decode
worker, from its second start to ready, without the pause before. `pss_mb` is the memory of all these
processes: a page that n processes share counts 1/n in each.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.command_line import bench_parser
from bench.medians import medians_of, print_medians
from bench.process_memory import pss_bytes
from libs.common.cluster.worker_record import Role
from supervisor import process_stats
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.plan import ClusterConfig
from supervisor.forking.starts import STARTS

_WORKER = "decode-0"
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_FAKE = {role: ("--engine", "fake") for role in (Role.PREFILL, Role.DECODE, Role.DRAFTER)}


def descendants(pid: int) -> Iterator[int]:
    """The processes below a process."""
    for child in process_stats.children(pid):
        yield child
        yield from descendants(child)


def cpu_s() -> float:
    """Processor time so far of this process, its descendants, and those that ended."""
    total = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    for pid in descendants(os.getpid()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # ended just now
            continue
        total += sum(map(int, fields[11:15])) / _TICKS_PER_S
    return total


async def measure(config: ClusterConfig) -> dict[str, float]:
    """Start a cluster, restart a worker, and stop it."""
    began_cpu_s = cpu_s()
    async with ClusterSupervisor(config, say=lambda line: None) as cluster:
        row = {
            "start_s": cluster.ready_s or 0.0,
            "start_cpu_s": cpu_s() - began_cpu_s,
            "pss_mb": sum(map(pss_bytes, descendants(os.getpid()))) / 1e6,
        }
        first = cluster.record().find(_WORKER).pid
        cluster.kill(_WORKER)
        while cluster.record().find(_WORKER).pid in (None, first):
            await asyncio.sleep(0.005)
        began_s, began_cpu_s = time.monotonic(), cpu_s()
        while cluster.record().find(_WORKER).state != "ready":
            await asyncio.sleep(0.005)
        row["restart_s"], row["restart_cpu_s"] = time.monotonic() - began_s, cpu_s() - began_cpu_s
    return row


def _options() -> argparse.Namespace:
    parser = bench_parser("start", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engine", choices=("torch", "fake"), default="torch")
    return parser.parse_args()


def main() -> None:
    """Measure both ways alternately, and print the medians."""
    options = _options()
    rows: dict[str, list[dict[str, float]]] = {start: [] for start in STARTS}
    for _ in range(options.rounds):
        for start in STARTS:
            with tempfile.TemporaryDirectory() as folder:
                extra: Any = _FAKE if options.engine == "fake" else {}
                config = ClusterConfig(run_dir=Path(folder), drafters=1, start=start, extra_arguments=extra)
                rows[start].append(asyncio.run(measure(config)))
    print_medians({start: medians_of(rows[start]) for start in STARTS}, as_json=options.json)


if __name__ == "__main__":
    main()

"""Faults of every kind on a real cluster under load: wrong answers, failures, stalls, and what is left.

    python -m bench.chaos --minutes 10 --json
    python -m bench.chaos --minutes 10 --soak            # and an hour of steady load, with memory slopes

Two routers, two of each worker, two KV stores with disks, a drafter and etcd serve the shipped model. Half of
the clients use the SDK with both routers, half plain HTTP with one. Processes are killed, alone, in pairs and
all at once, and stopped for 5 to 40 s. Etcd is lost with its data, disks are full, bits flip in segments, and
segments are deleted. A rolling restart of every process follows. Each text is compared with that of an
undisturbed run. The shim that fills the disks makes the stores read without io_uring.

Exit status 1: a text was wrong, a request over the SDK failed, one over HTTP failed by anything but the
connection to a router that was killed, or the rolling restart took more than 60 s. Also where something is
left: blocks, ledgers, shared memory, temporary files, more than 16 descriptors of a process, or with --soak a
growth of more than 100 MB or 16 descriptors an hour.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from bench.chaos.clients import ClientLoad, ask_http, ask_sdk
from bench.chaos.faults import FaultInjector
from bench.chaos.leftovers import (
    Sample,
    excesses,
    growth,
    leftover_files,
    sample,
    shared_memory_files,
    temporary_files_in,
)
from bench.chaos.prompts import ChaosPrompt, prompts
from bench.chaos.report import judge, report
from bench.chaos.schedule import schedule
from bench.command_line import bench_parser, print_report
from bench.faults.faulty_disk import FaultyDisk
from bench.ledgers import wait_until_idle
from bench.progress import say
from libs.common.cluster.worker_record import Role
from slipstream.async_client import AsyncClient
from slipstream.operator_access import operator_dial
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.plan import ClusterConfig

N_PROMPTS = 24
_SAMPLE_S = 5.0
_IDLE_S = 60.0
_MAX_ROLLING_S = 60.0

# Texts are compared byte by byte. With products in bf16, a near tie may fall otherwise where a prompt is
# computed in other pieces, as after a hit of the cache or a failover (ADR 0004).
_COMPUTE = ("--compute-dtype", "float32")


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = bench_parser("chaos", __doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults")
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--pause-s", type=float, default=0.0, help="of each client after an answer")
    parser.add_argument("--seed", type=int, default=1, help="of the schedule and the clients")
    parser.add_argument(
        "--soak", action="store_true", help="then steady load, and the growth of each process"
    )
    parser.add_argument("--soak-minutes", type=float, default=60.0)
    return parser.parse_args(argv)


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """The whole run."""
    before = shared_memory_files()
    with tempfile.TemporaryDirectory() as folder:
        run_dir, temporary = Path(folder) / "run", Path(folder) / "tmp"
        with temporary_files_in(temporary), FaultyDisk(Path(folder), run_dir / "data") as disk:
            config = ClusterConfig(
                run_dir=run_dir,
                routers=2,
                kvstores=2,
                drafters=1,
                extra_environment={Role.KVSTORE: disk.environment},
                extra_arguments=dict.fromkeys((Role.PREFILL, Role.DECODE), _COMPUTE),
            )
            async with ClusterSupervisor(config, say=say) as cluster:
                found = await _measure(cluster, disk, options)
        temporary_left = [*leftover_files(temporary), *leftover_files(run_dir, ends=".tmp")]
    left = shared_memory_files() - before
    found["shared_memory_files_left"] = sorted(left)
    found["temporary_files_left"] = temporary_left
    found["holds"] = bool(found["holds"]) and not left and not temporary_left
    return found


async def _measure(
    cluster: ClusterSupervisor, disk: FaultyDisk, options: argparse.Namespace
) -> dict[str, object]:
    asked = prompts(N_PROMPTS)
    routers = {p.instance: p for p in cluster.record().processes if p.role == Role.ROUTER}
    load = ClientLoad(
        asked,
        grpc=[process.endpoint for process in routers.values()],
        http={name: process.http or "" for name, process in routers.items()},
        model=Path(cluster.record().model).name,
        seed=options.seed,
        pause_s=options.pause_s,
    )
    expected = await _undisturbed(cluster, asked)
    began = sample(cluster.record(), now_s=0.0)
    injector = FaultInjector(cluster, disk, random.Random(options.seed))
    running = asyncio.create_task(load.run(options.clients))
    try:
        await injector.run(
            schedule(
                random.Random(options.seed),
                workers=[p.instance for p in cluster.record().processes if p.has_worker_service],
                stores=[p.instance for p in cluster.record().processes if p.role == Role.KVSTORE],
                until_s=options.minutes * 60,
            )
        )
        await injector.until_ready()
        n_chaos = len(load.outcomes)
        rolling_s = await injector.restart_all()
        samples = await _steady(cluster, options.soak_minutes * 60) if options.soak else []
    finally:
        load.close()
    await running
    judged = judge(load.outcomes, expected, injector.down_s)
    problems: list[str] = []
    dial = operator_dial(Path(cluster.record().run_dir))
    endpoints = cluster.record().service_endpoints()
    leaked = await wait_until_idle(endpoints, problems, dial, timeout_s=_IDLE_S)
    ended = sample(cluster.record(), now_s=0.0)
    slopes = growth(samples)
    too_much = excesses(began, ended, slopes)
    return {
        "cores": os.cpu_count(),
        "minutes": options.minutes,
        "clients": options.clients,
        "pause_s": options.pause_s,
        "faults": injector.done,
        "requests_during_faults": n_chaos,
        "rolling_restart_s": round(rolling_s, 1),
        **report(load.outcomes, judged),
        "still_held": problems,
        "blocks_leaked": leaked,
        "descriptors": {name: (began[name].n_descriptors, ended[name].n_descriptors) for name in ended},
        "rss_mb": {
            name: (began[name].rss_bytes // 1_000_000, ended[name].rss_bytes // 1_000_000) for name in ended
        },
        "growth": slopes,
        "excesses": too_much,
        "holds": judged.holds and not (problems or leaked or too_much) and rolling_s <= _MAX_ROLLING_S,
    }


async def _undisturbed(cluster: ClusterSupervisor, asked: Sequence[ChaosPrompt]) -> list[str]:
    """The text of each prompt. Raises RuntimeError when SDK and HTTP differ."""
    record = cluster.record()
    texts = []
    async with (
        AsyncClient(record.router_grpc) as client,
        aiohttp.ClientSession(f"http://{record.router_http}") as http,
    ):
        for number in range(len(asked)):
            first = await ask_sdk(client, asked, number, "undisturbed")
            second = await ask_http(http, asked, number, router="router-0", model=Path(record.model).name)
            if first.error or second.error or first.text != second.text:
                raise RuntimeError(f"prompt {number}: {first} and {second} differ without any fault")
            texts.append(first.text)
    return texts


async def _steady(cluster: ClusterSupervisor, lasts_s: float) -> list[dict[str, Sample]]:
    """Samples of all processes while the load runs undisturbed."""
    began_s, samples = time.monotonic(), []
    while (now_s := time.monotonic() - began_s) < lasts_s:
        samples.append(sample(cluster.record(), now_s=now_s))
        await asyncio.sleep(_SAMPLE_S)
    return samples


def main() -> int:
    """Measure and print."""
    options = parse_options()
    found = asyncio.run(measure(options))
    print_report(found, as_json=options.json)
    return 0 if found["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())

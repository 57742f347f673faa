"""The time until a link is used again after a fault on it ends, and the backlog that grows before.

    python -m bench.heal --json                                # every link, every fault
    python -m bench.heal --links router-decode,kvstore-bytes --faults blackhole --rounds 5

Workers of every tier run as separate processes with the fake engine, which checks every byte of KV. The
router runs in this process, and every link has a proxy, also the links that carry KV bytes. A fault lasts for
some seconds of load; requests continue until one that began after the fault has used the link. `heal_s` is
the time from the end of the fault to the end of that request; the aim is 5 s. `drop_state` loses the
connections without a packet to either end, so that only pings find out. `backlog` has the largest values:
bytes in the sockets of the link, commands that wait for a worker's stream, growth of a process's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.command_line import bench_parser, print_report
from bench.faults.fault_load import FaultRequest, FaultRun, answer_of, mixed_requests, run_streams, wrong
from bench.faults.link_backlog import LinkBacklog
from bench.progress import say
from bench.request_log import percentiles
from slipstream.rpc.backoff import HEAL_S
from tests.support.clusters.mesh import PAGE_BYTES, Mesh, MeshShape, open_mesh
from tests.support.network.fault_proxy import FaultProxy

# (the fault, its duration in seconds: long enough for every back-off to reach its longest pause)
FAULTS: dict[str, tuple[Callable[[FaultProxy], None], float]] = {
    "cut": (FaultProxy.cut, 4.0),
    "blackhole": (FaultProxy.blackhole, 4.0),
    "delay": (lambda proxy: proxy.delay(0.1), 1.0),
    "trickle": (lambda proxy: proxy.trickle(20_000), 1.0),
    "reset": (FaultProxy.reset, 0.5),
    "drop_state": (FaultProxy.drop_state, 1.0),
}
# Workers store over the calls of "workers-kvstore" too, but these calls have their own retries.
KVSTORE_WRITES = "kvstore-writes"
# With a kvstore prefill workers rarely lend to each other: test_faults_lending.py runs without one.
LINKS = (
    "client-router",
    "router-prefill",
    "router-decode",
    "decode-prefill",
    "decode-drafter",
    "workers-kvstore",
    KVSTORE_WRITES,
    "prefill-bytes",
    "kvstore-bytes",
    "decode-bytes",
)
STREAMS, TOKENS = 6, 48
_LIMIT_S = 60.0
# Few pages in prefill: a repeated prompt comes from the kvstore.
_PREFILL = ("--kv-memory-bytes", str(24 * PAGE_BYTES))
_DECODE = ("--kv-memory-bytes", str(160 * PAGE_BYTES), "--drafts", "on")
_N_REPEATED = 40


@dataclass(slots=True)
class Heal:
    """Measurements of one fault."""

    link: str
    fault: str
    heal_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    backlog: dict[str, int] = field(default_factory=dict)


class Healing:
    """The mesh under test, and a load that uses every link of it."""

    def __init__(self, mesh: Mesh, rng: random.Random) -> None:
        self._mesh, self._rng = mesh, rng
        self._new = iter(mixed_requests(100_000, tokens=TOKENS, words=60)[_N_REPEATED:])
        self._repeated = mixed_requests(_N_REPEATED, tokens=TOKENS, words=60)
        self._numbers = itertools.cycle(range(_N_REPEATED))
        self._backlog = LinkBacklog(mesh)

    async def prepare(self) -> None:
        """Record the answers of the repeated requests; the kvstore has their KV afterwards."""
        runs = [run for request in self._repeated for run in await run_streams(self._mesh.client, [request])]
        if failed := [run.error for run in runs if run.error]:
            raise RuntimeError(failed[0])
        self._expected = [answer_of(run) for run in runs]

    async def heal(self, link: str, fault: str) -> Heal:
        """Inject the fault, and measure until a request uses the link again."""
        found, mesh = Heal(link, fault), self._mesh
        inject, duration_s = FAULTS[fault]
        faulted = "workers-kvstore" if link == KVSTORE_WRITES else link
        await mesh.all_ready()
        await mesh.idle()
        used = asyncio.get_running_loop().create_future()
        restored_s = float("inf")

        async def ask() -> None:
            while not used.done():
                began_s, before = time.monotonic(), await self._carried(link)
                run, problems = await self._one(link)
                found.problems += problems
                proof = began_s >= restored_s and uses(link, run, await self._carried(link) - before)
                if proof and not used.done():
                    used.set_result(time.monotonic())

        async with self._backlog.watched(faulted) as backlog, asyncio.TaskGroup() as tasks:
            for _ in range(STREAMS):
                tasks.create_task(ask())
            await asyncio.sleep(0.2)
            mesh.set_fault(faulted, inject)
            await asyncio.sleep(duration_s * self._rng.uniform(0.8, 1.2))
            mesh.set_fault(faulted, FaultProxy.restore)
            restored_s = time.monotonic()
            await asyncio.wait({used}, timeout=_LIMIT_S)
            if not used.done():
                found.problems.append(f"{link} is not used {_LIMIT_S:g} s after {fault}")
                used.set_result(time.monotonic())
        found.heal_s, found.backlog = used.result() - restored_s, backlog
        return found

    async def _carried(self, link: str) -> int:
        """Bytes carried so far by a KV link, or blocks stored by workers; 0 for other links."""
        if link == KVSTORE_WRITES:
            return int(
                (await self._mesh.status("kvstore-0")).counters["slipstream_kvstore_commit_seconds_count"]
            )
        return self._mesh.kv_links[link].carried_bytes if link in self._mesh.kv_links else 0

    async def _one(self, link: str) -> tuple[FaultRun, list[str]]:
        """Run a repeated request, whose KV the kvstore has, or a new one; returns it and its problems."""
        if link not in ("workers-kvstore", "kvstore-bytes"):
            run = (await run_streams(self._mesh.client, [next(self._new)]))[0]
            return run, [f"{link}: {run.error}"] if run.error else []
        number = next(self._numbers)
        request = _renamed(self._repeated[number], self._rng)
        runs = await run_streams(self._mesh.client, [request])
        return runs[0], [f"{link}: {problem}" for problem in wrong(runs, [self._expected[number]])]


def _renamed(request: FaultRequest, rng: random.Random) -> FaultRequest:
    """The same request with a new id; a request whose seed derives from the id keeps the id."""
    arguments: dict[str, Any] = dict(request.arguments)
    if "seed" in arguments or not arguments["temperature"]:
        arguments["request_id"] = f"again-{rng.getrandbits(64):x}"
    return FaultRequest(request.messages, arguments)


def uses(link: str, run: FaultRun, carried: int) -> bool:
    """Whether this request used the link. `carried`: growth of `Healing._carried` during the request."""
    stats, usage = run.reply.stats, run.reply.usage
    if run.error or stats is None or usage is None:
        return False
    is_proxied = stats.prefill_worker == "prefill-0"
    proofs = {
        "client-router": True,
        "router-prefill": is_proxied,
        "router-decode": stats.decode_worker == "decode-0",
        "decode-prefill": is_proxied and stats.attempts == 1,
        "decode-drafter": stats.proposed_drafts > 0,
        "workers-kvstore": usage.cached_by_tier.get("dram", 0) > 0,
        "kvstore-bytes": usage.cached_by_tier.get("dram", 0) > 0 and carried > 0,
        KVSTORE_WRITES: carried > 0,
        "prefill-bytes": carried >= PAGE_BYTES,
        "decode-bytes": carried >= PAGE_BYTES,
    }
    return proofs[link]


def summary(heals: list[Heal]) -> dict[str, object]:
    """The report: by link and fault, and over all."""
    by_pair: dict[str, dict[str, list[float]]] = {}
    for heal in heals:
        by_pair.setdefault(heal.link, {}).setdefault(heal.fault, []).append(heal.heal_s)
    table = {
        link: {fault: {"p50": _p(times, 50), "p99": _p(times, 99)} for fault, times in faults.items()}
        for link, faults in by_pair.items()
    }
    times = [heal.heal_s for heal in heals]
    backlog: dict[str, int] = {}
    for heal in heals:
        for name, amount in heal.backlog.items():
            backlog[name] = max(backlog.get(name, 0), amount)
    return {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "heal_s": table,
        "all": {"n": len(times), "p50": _p(times, 50), "p99": _p(times, 99), "max": round(max(times), 2)},
        "aim_s": HEAL_S,
        "backlog": backlog,
        "problems": [problem for heal in heals for problem in heal.problems],
    }


def _p(times: list[float], percent: int) -> float:
    return percentiles(times).get(f"p{percent}", 0.0)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = bench_parser("heal", __doc__)
    parser.add_argument("--links", default="", help="comma-separated; all by default")
    parser.add_argument("--faults", default="", help=f"comma-separated, of {', '.join(FAULTS)}")
    parser.add_argument("--rounds", type=int, default=1, help="of every pair")
    parser.add_argument("--transport", choices=("socket", "mooncake"), default="socket")
    parser.add_argument("--seed", type=int, default=7)
    return parser.parse_args()


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Measure every pair of link and fault in turn."""
    shape = MeshShape(prefill=_PREFILL, decode=_DECODE, transport=options.transport)
    faults = options.faults.split(",") if options.faults else list(FAULTS)
    heals: list[Heal] = []
    with tempfile.TemporaryDirectory() as folder:
        async with open_mesh(Path(folder), shape) as mesh:
            links = options.links.split(",") if options.links else list(LINKS)
            healing = Healing(mesh, random.Random(options.seed))
            await healing.prepare()
            for _, link, fault in itertools.product(range(options.rounds), links, faults):
                heals.append(await healing.heal(link, fault))
                say(f"{link:16} {fault:10} {heals[-1].heal_s:6.2f} s")
    return summary(heals)


def main() -> int:
    """Measure and print; 1 when an answer was wrong, a request failed, or a link did not heal."""
    options = parse_options()
    report = asyncio.run(measure(options))
    print_report(report, as_json=options.json)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

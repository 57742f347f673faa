"""How soon a link is used again after a fault on it is lifted, and what piles up meanwhile.

    python -m bench.heal --json                                # every link, every fault
    python -m bench.heal --links router-decode,kvstore-bytes --faults blackhole --rounds 5

Workers of every tier as processes of their own (fake engine, which proves every byte of KV), a router in this
process, and a proxy on every link between them, those of the KV bytes included. A fault lasts for some
seconds of load; then it is lifted, and requests go on until one that began after that has used the link.
Heal: from the lifting to the end of that request, aim 5 s. With `forget` the network forgets the connections
and tells nobody; only pings find that out. Piled up, the largest seen: bytes in the sockets of the link,
commands that wait to be written to a worker, growth of a process's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.faults.fault_load import FaultRequest, FaultRun, answer_of, mixed_requests, run_streams, wrong
from bench.faults.heal_piles import Piles
from bench.load import percentiles
from slipstream.rpc.backoff import HEAL_S
from tests.support.clusters.mesh import PAGE_BYTES, Mesh, MeshShape, open_mesh
from tests.support.network.fault_proxy import FaultProxy

# (what it does, how long it lasts: long enough for every back-off to have risen to its longest pause)
FAULTS: dict[str, tuple[Callable[[FaultProxy], None], float]] = {
    "cut": (FaultProxy.cut, 4.0),
    "blackhole": (FaultProxy.blackhole, 4.0),
    "delay": (lambda proxy: proxy.delay(0.1), 1.0),
    "trickle": (lambda proxy: proxy.trickle(20_000), 1.0),
    "reset": (FaultProxy.reset, 0.5),
    "forget": (FaultProxy.forget, 1.0),
}
# What workers store goes by the calls of "workers-kvstore", too, but has a way back of its own.
KVSTORE_WRITES = "kvstore-writes"
# Lending is the kvstore's rival: tests/e2e/faults/test_faults_lending.py looks at it without one.
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
_GIVE_UP_S = 60.0
# Few pages in prefill: what was asked before comes from the kvstore when it is asked again.
_PREFILL = ("--kv-memory-bytes", str(24 * PAGE_BYTES))
_DECODE = ("--kv-memory-bytes", str(160 * PAGE_BYTES), "--drafts", "on")
_OLD = 40


@dataclass(slots=True)
class Heal:
    """What one fault did."""

    link: str
    fault: str
    heal_s: float = 0.0
    problems: list[str] = field(default_factory=list)
    piled: dict[str, int] = field(default_factory=dict)


class Healing:
    """The mesh under test, and a load that uses every link of it."""

    def __init__(self, mesh: Mesh, rng: random.Random) -> None:
        self._mesh, self._rng = mesh, rng
        self._fresh = iter(mixed_requests(100_000, tokens=TOKENS, words=60)[_OLD:])
        self._old = mixed_requests(_OLD, tokens=TOKENS, words=60)
        self._turns = itertools.cycle(range(_OLD))
        self._piles = Piles(mesh)

    async def prepare(self) -> None:
        """The answers that repeated requests must give; the kvstore has their KV afterwards."""
        runs = [run for request in self._old for run in await run_streams(self._mesh.client, [request])]
        if failed := [run.error for run in runs if run.error]:
            raise RuntimeError(failed[0])
        self._expected = [answer_of(run) for run in runs]

    async def heal(self, link: str, fault: str) -> Heal:
        """Let the link misbehave, and measure until it is used again."""
        found, mesh = Heal(link, fault), self._mesh
        strike, lasts_s = FAULTS[fault]
        struck = "workers-kvstore" if link == KVSTORE_WRITES else link
        await mesh.all_ready()
        await mesh.idle()
        used = asyncio.get_running_loop().create_future()
        lifted_s = float("inf")

        async def ask() -> None:
            while not used.done():
                began_s, before = time.monotonic(), await self._carried(link)
                run, problems = await self._one(link)
                found.problems += problems
                proof = began_s >= lifted_s and uses(link, run, await self._carried(link) - before)
                if proof and not used.done():
                    used.set_result(time.monotonic())

        async with self._piles.watched(struck) as piled, asyncio.TaskGroup() as tasks:
            for _ in range(STREAMS):
                tasks.create_task(ask())
            await asyncio.sleep(0.2)
            mesh.set_fault(struck, strike)
            await asyncio.sleep(lasts_s * self._rng.uniform(0.8, 1.2))
            mesh.set_fault(struck, FaultProxy.restore)
            lifted_s = time.monotonic()
            await asyncio.wait({used}, timeout=_GIVE_UP_S)
            if not used.done():
                found.problems.append(f"{link} is not used {_GIVE_UP_S:g} s after {fault}")
                used.set_result(time.monotonic())
        found.heal_s, found.piled = used.result() - lifted_s, piled
        return found

    async def _carried(self, link: str) -> int:
        """So far: bytes on a way of KV bytes, or what workers have stored; 0 for other links."""
        if link == KVSTORE_WRITES:
            return int((await self._mesh.status("kvstore-0")).counters["slipstream_kvstore_commits_total"])
        return self._mesh.kv_links[link].carried_bytes if link in self._mesh.kv_links else 0

    async def _one(self, link: str) -> tuple[FaultRun, list[str]]:
        """A request whose KV the kvstore has, or a new one; and what is wrong with its answer."""
        if link not in ("workers-kvstore", "kvstore-bytes"):
            run = (await run_streams(self._mesh.client, [next(self._fresh)]))[0]
            return run, [f"{link}: {run.error}"] if run.error else []
        number = next(self._turns)
        request = _renamed(self._old[number], self._rng)
        runs = await run_streams(self._mesh.client, [request])
        return runs[0], [f"{link}: {problem}" for problem in wrong(runs, [self._expected[number]])]


def _renamed(request: FaultRequest, rng: random.Random) -> FaultRequest:
    """The same, under an id of its own; one whose seed follows from the id keeps it."""
    arguments: dict[str, Any] = dict(request.arguments)
    if "seed" in arguments or not arguments["temperature"]:
        arguments["request_id"] = f"again-{rng.getrandbits(64):x}"
    return FaultRequest(request.messages, arguments)


def uses(link: str, run: FaultRun, carried: int) -> bool:
    """Whether this request went over the link. `carried`: see `Healing._carried`, meanwhile."""
    trail, usage = run.reply.stats, run.reply.usage
    if run.error or trail is None or usage is None:
        return False
    by_first = trail.prefill_worker == "prefill-0"  # which is the one behind the proxies
    proofs = {
        "client-router": True,
        "router-prefill": by_first,
        "router-decode": trail.decode_worker == "decode-0",
        "decode-prefill": by_first and trail.attempts == 1,
        "decode-drafter": trail.proposed_drafts > 0,
        "workers-kvstore": usage.cached_by_tier.get("dram", 0) > 0,
        "kvstore-bytes": usage.cached_by_tier.get("dram", 0) > 0 and carried > 0,
        KVSTORE_WRITES: carried > 0,
        "prefill-bytes": carried >= PAGE_BYTES,
        "decode-bytes": carried >= PAGE_BYTES,
    }
    return proofs[link]


def summary(heals: list[Heal]) -> dict[str, object]:
    """By link and fault, and all together."""
    by_pair: dict[str, dict[str, list[float]]] = {}
    for heal in heals:
        by_pair.setdefault(heal.link, {}).setdefault(heal.fault, []).append(heal.heal_s)
    table = {
        link: {fault: {"p50": _p(of_it, 50), "p99": _p(of_it, 99)} for fault, of_it in faults.items()}
        for link, faults in by_pair.items()
    }
    times = [heal.heal_s for heal in heals]
    piled: dict[str, int] = {}
    for heal in heals:
        for name, amount in heal.piled.items():
            piled[name] = max(piled.get(name, 0), amount)
    return {
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "heal_s": table,
        "all": {"n": len(times), "p50": _p(times, 50), "p99": _p(times, 99), "max": round(max(times), 2)},
        "aim_s": HEAL_S,
        "piled_up": piled,
        "problems": [problem for heal in heals for problem in heal.problems],
    }


def _p(times: list[float], percent: int) -> float:
    return percentiles(times).get(f"p{percent}", 0.0)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.heal", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--links", default="", help="some of them, with commas between")
    parser.add_argument("--faults", default="", help=f"some of {', '.join(FAULTS)}")
    parser.add_argument("--rounds", type=int, default=1, help="of every pair")
    parser.add_argument("--transport", choices=("socket", "mooncake"), default="socket")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    return parser.parse_args()


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """All pairs in turn."""
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
                print(f"{link:16} {fault:10} {heals[-1].heal_s:6.2f} s", file=sys.stderr)
    return summary(heals)


def main() -> int:
    """Measure and print; 1 when an answer was wrong, a request failed, or a link did not heal."""
    options = parse_options()
    report = asyncio.run(measure(options))
    print(json.dumps(report, indent=None if options.json else 2))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""python -m bench.placement.decision: the time of one placement, as it is and in its most readable form.

    python -m bench.placement.decision [--workers 1,4,16,64] [--decisions 400] [--changed all] [--json]

"place" is `place` of the router, "reference" the form of tests/router/placement/reference.py. Both decide the
same requests in turn, in one process, and must decide the same. "dispatch" is the whole choice of the router:
the lookup in the prefix index, the loads of all workers and `place`. Between two decisions requests come and
go on eight workers of each role, or with `--changed all` on all of them. Times are CPU times of the thread.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from bench.command_line import bench_parser
from bench.placement.idle_fleet import BLOCK_TOKENS, FINGERPRINT, NOW_S, IdleConnection, open_fleet
from libs.common.cluster.placement_record import Placement
from libs.common.cluster.worker_record import Role
from services.router.execution.dispatcher import Dispatcher, PlacementQuery
from services.router.placement.cost_model import PrefillReport
from services.router.placement.policy import place
from services.router.workers.connection import TokensInFlight
from services.router.workers.fleet import RouterFleet
from slipstream.v1 import common_pb2, worker_pb2
from tests.router.placement import reference

SHARED_BLOCKS = 16  # of a system prompt that every worker holds
PROMPT_BLOCKS = 128
N_SESSIONS = 200
WARM_SHARE = 0.7  # of the requests continue a session
CHANGED_WORKERS = 8  # between two decisions

_T = TypeVar("_T")


class Scene:
    """A loaded fleet, and requests of sessions that come to it."""

    def __init__(self, fleet: RouterFleet, *, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self.fleet = fleet
        self._prefill = [link for link in fleet.links_of(Role.PREFILL) if isinstance(link, IdleConnection)]
        self._decode = [link for link in fleet.links_of(Role.DECODE) if isinstance(link, IdleConnection)]
        self._sequence = 0
        self._counts: dict[str, list[TokensInFlight]] = {}
        shared = self._blocks(SHARED_BLOCKS)
        self._prompts = [[*shared, *self._blocks(PROMPT_BLOCKS - SHARED_BLOCKS)] for _ in range(N_SESSIONS)]
        self._shared = shared
        for link in (*self._prefill, *self._decode):
            for _ in range(3):
                self.change(link)
        self._teach()
        self._fill_caches()

    def change(self, link: IdleConnection) -> None:
        """A request comes to the worker, the oldest of four ends, and the worker reports its load."""
        draw, counts = self._random, self._counts.setdefault(link.key, [])
        counts.append(TokensInFlight(link, draw.randint(200, 6_000)))
        if len(counts) > 4:
            counts.pop(0).release()
        self._sequence += 1
        link.report_load(
            worker_pb2.LoadReport(
                sequence=self._sequence,
                requests_running=draw.randint(1, 12),
                prefill_tokens_in_flight=draw.randint(0, 30_000) if link in self._prefill else 0,
                decode_tokens_in_flight=draw.randint(1, 90_000) if link in self._decode else 0,
                blocks_free=draw.randint(500, 5_000),
                decode_step_ms=draw.uniform(10.0, 20.0),
            )
        )

    def change_some(self, n_workers: int) -> None:
        """`change` on so many prefill and decode workers each."""
        for links in (self._prefill, self._decode):
            for link in self._random.sample(links, min(n_workers, len(links))):
                self.change(link)

    def query(self) -> PlacementQuery:
        """A request of a session, or a new prompt behind the shared system prompt."""
        hashes = self._random.choice(self._prompts)
        if self._random.random() > WARM_SHARE:
            hashes = [*self._shared, *self._blocks(PROMPT_BLOCKS - SHARED_BLOCKS)]
        return PlacementQuery(
            tenant="bench",
            fingerprint=FINGERPRINT,
            prompt_tokens=len(hashes) * BLOCK_TOKENS + 17,
            hashes=hashes,
            seed=self._random.getrandbits(64),
            session=Placement(),
            may_skip_prefill=True,
        )

    def _blocks(self, n: int) -> list[bytes]:
        return [self._random.randbytes(16) for _ in range(n)]

    def _teach(self) -> None:
        """Give each worker separate rates."""
        for link in self._prefill:
            for _ in range(10):
                tokens = self._random.randint(500, 8_000)
                report = PrefillReport(
                    uncached_tokens=tokens,
                    prompt_tokens=tokens,
                    duration_ms=tokens * self._random.uniform(0.09, 0.11),
                )
                self.fleet.worker_models.observe_prefill(link.key, report)

    def _fill_caches(self) -> None:
        index, worker, dram = self.fleet.index, common_pb2.CACHE_TIER_WORKER, common_pb2.CACHE_TIER_DRAM
        holders = [(link.key, worker) for link in self._prefill]
        holders += [(link.key, dram) for link in self.fleet.links_of(Role.KVSTORE)]
        for key, tier in holders:
            view = index.view(key)
            view.incarnation = "1"
            view.stored(tier, self._shared)
        for hashes in self._prompts:
            index.view(self._random.choice(self._prefill).key).stored(worker, hashes)
            index.view(self._random.choice(holders)[0]).stored(dram, hashes[: PROMPT_BLOCKS // 2])
            decode = self._random.choice(self._decode).key
            index.predict(decode, hashes, tenant="bench", now_s=NOW_S, ttl_s=1e6)


def _timed(times_ms: list[float], work: Callable[[], _T]) -> _T:
    begin_s = time.thread_time()
    result = work()
    times_ms.append((time.thread_time() - begin_s) * 1e3)
    return result


def measure(scene: Scene, *, decisions: int, changed: int) -> dict[str, list[float]]:
    """Times in milliseconds. Raises AssertionError where the two forms decide differently."""
    fleet = scene.fleet
    dispatcher = Dispatcher(fleet, clock=lambda: NOW_S)
    times: dict[str, list[float]] = {"place": [], "reference": [], "dispatch": []}
    for i in range(decisions):
        scene.change_some(changed)
        query = scene.query()
        _timed(times["dispatch"], partial(dispatcher.choose, query))
        scene.change_some(changed)
        query = scene.query()
        request, records = dispatcher.request(query, NOW_S), fleet.loads()
        if i % 2:  # the second form finds the records in the processor's cache
            decided = _timed(times["place"], partial(place, request, records))
            expected = _timed(times["reference"], partial(reference.place, request, records))
        else:
            expected = _timed(times["reference"], partial(reference.place, request, records))
            decided = _timed(times["place"], partial(place, request, records))
        assert (decided.prefill, decided.decode) == (expected.prefill, expected.decode)
        assert decided.cost.total_ms == expected.cost.total_ms
    return times


async def run(n_workers: int, *, decisions: int, all_changed: bool) -> dict[str, Any]:
    """One row of figures for n prefill and n decode workers."""
    async with open_fleet(n_workers) as fleet:
        scene = Scene(fleet)
        changed = n_workers if all_changed else min(CHANGED_WORKERS, n_workers)
        measure(scene, decisions=20, changed=changed)
        times = measure(scene, decisions=decisions, changed=changed)
    row: dict[str, Any] = {"workers": f"{n_workers}+{n_workers}", "changed": changed}
    for what, times_ms in times.items():
        row[f"{what}_ms"] = round(statistics.median(times_ms), 4)
        row[f"{what}_best_ms"] = round(min(times_ms), 4)
    row["ratio"] = round(row["place_ms"] / row["reference_ms"], 2)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each size of fleet."""
    parser = bench_parser("placement.decision", __doc__)
    parser.add_argument("--workers", default="1,4,16,64", help="prefill workers, as many as decode workers")
    parser.add_argument("--decisions", type=int, default=400)
    parser.add_argument("--changed", choices=("some", "all"), default="some")
    options = parser.parse_args(argv)
    rows = [
        asyncio.run(run(int(n), decisions=options.decisions, all_changed=options.changed == "all"))
        for n in options.workers.split(",")
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        print(", ".join([f"{name} {value}" for name, value in row.items()]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

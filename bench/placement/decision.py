"""python -m bench.placement.decision: the time of one placement, in two forms.

    python -m bench.placement.decision [--workers 8,64,256] [--decisions 400] [--changed all] [--json]

"arrays" is the router's decision over columns that follow the loads of the workers. "records" is the readable
form of tests/router/placement/reference.py, over records built for each decision. Both decide the same
requests in turn, in one process, and must decide the same. "place" is the decision alone; "dispatch" adds the
lookup in the prefix index and the loads of all workers. Between two decisions requests come and go on eight
workers of each role, or with `--changed all` on all of them. Times are CPU times of the thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from bench.placement.idle_fleet import BLOCK_TOKENS, FINGERPRINT, NOW_S, IdleConnection, open_fleet
from libs.common.cluster.placement_record import Placement
from libs.common.cluster.worker_record import Role
from services.router.execution.dispatcher import Dispatcher, PlacementQuery
from services.router.placement.fleet_arrays import HeldColumns
from services.router.placement.policy import place
from services.router.placement.types import (
    HeldTokens,
    PlacementDecision,
    PlacementFleet,
    PlacementRequest,
)
from services.router.workers.connection import TokensInFlight
from services.router.workers.fleet import RouterFleet
from services.router.workers.placement_view import decode_worker, kvstore, prefill_worker
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
        """Give each worker rates of its own."""
        for link in self._prefill:
            for _ in range(10):
                tokens = self._random.randint(500, 8_000)
                self.fleet.book.observe_prefill(
                    link.key,
                    ahead_tokens=0,
                    ahead_requests=0,
                    uncached_tokens=tokens,
                    prompt_tokens=tokens,
                    dram_tokens=0,
                    nvme_tokens=0,
                    duration_ms=tokens * self._random.uniform(0.09, 0.11),
                )

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


def fleet_of_records(fleet: RouterFleet) -> PlacementFleet:
    """All workers as records."""
    return PlacementFleet(
        tuple([prefill_worker(each, fleet.book, fleet.spread) for each in fleet.links_of(Role.PREFILL)]),
        tuple([decode_worker(each, fleet.book) for each in fleet.links_of(Role.DECODE)]),
        tuple([kvstore(each) for each in fleet.links_of(Role.KVSTORE)]),
    )


def request_by_holder(fleet: RouterFleet, query: PlacementQuery) -> PlacementRequest:
    """The request with what each worker holds, looked up worker by worker."""
    found = fleet.index.find(query.hashes, tenant=query.tenant, now_s=NOW_S)

    def tokens(key: str, *, tier: int | None = None) -> int:
        return found.blocks(key, tier=tier) * BLOCK_TOKENS

    prefill = fleet.links_of(Role.PREFILL)
    tier, dram = common_pb2.CACHE_TIER_WORKER, common_pb2.CACHE_TIER_DRAM
    confirmed = {link.worker.instance: tokens(link.key, tier=tier) for link in prefill}
    return PlacementRequest(
        prompt_tokens=query.prompt_tokens,
        seed=query.seed,
        fingerprint=FINGERPRINT.digest.hex(),
        prefill_expected_tokens={link.worker.instance: tokens(link.key) for link in prefill},
        prefill_confirmed_tokens=confirmed,
        prefill_lendable_tokens=confirmed,
        decode_expected_tokens={
            link.worker.instance: tokens(link.key) for link in fleet.links_of(Role.DECODE)
        },
        store_held={
            link.worker.instance: HeldTokens(tokens(link.key), tokens(link.key, tier=dram))
            for link in fleet.links_of(Role.KVSTORE)
        },
        content_key=query.hashes[0],
        may_skip_prefill=query.may_skip_prefill,
    )


def _timed(times_ms: list[float], work: Callable[[], _T]) -> _T:
    begin_s = time.thread_time()
    result = work()
    times_ms.append((time.thread_time() - begin_s) * 1e3)
    return result


def measure(scene: Scene, *, decisions: int, changed: int) -> dict[str, dict[str, list[float]]]:
    """Times in milliseconds of each form. Raises AssertionError where the two decide differently."""
    fleet = scene.fleet
    dispatcher = Dispatcher(fleet, clock=lambda: NOW_S)
    times: dict[str, dict[str, list[float]]] = {
        form: {"place": [], "dispatch": []} for form in ("arrays", "records")
    }
    for _ in range(decisions):
        scene.change_some(changed)
        query = scene.query()
        decided = _timed(times["arrays"]["dispatch"], partial(dispatcher.choose, query)).decision
        expected = _timed(times["records"]["dispatch"], partial(_choose_by_records, fleet, query))
        assert decided == expected and decided.candidates == expected.candidates
        request, records = request_by_holder(fleet, query), fleet_of_records(fleet)
        arrays = fleet.placement_arrays()
        held = HeldColumns.of(request, arrays)
        _timed(times["arrays"]["place"], partial(place, request, arrays, held))
        _timed(times["records"]["place"], partial(reference.place, request, records))
    return times


def _choose_by_records(fleet: RouterFleet, query: PlacementQuery) -> PlacementDecision:
    return reference.place(request_by_holder(fleet, query), fleet_of_records(fleet))


async def run(n_workers: int, *, decisions: int, all_changed: bool) -> dict[str, Any]:
    """One row of figures for n prefill and n decode workers."""
    async with open_fleet(n_workers) as fleet:
        scene = Scene(fleet)
        changed = n_workers if all_changed else min(CHANGED_WORKERS, n_workers)
        measure(scene, decisions=20, changed=changed)
        times = measure(scene, decisions=decisions, changed=changed)
    row: dict[str, Any] = {"workers": f"{n_workers}+{n_workers}", "changed": changed}
    for what in ("place", "dispatch"):
        medians = {form: statistics.median(times[form][what]) for form in times}
        row[what] = {f"{form}_ms": round(median_ms, 4) for form, median_ms in medians.items()}
        row[what]["ratio"] = round(medians["records"] / medians["arrays"], 2)
        row[what]["arrays_p99_ms"] = round(statistics.quantiles(times["arrays"][what], n=100)[98], 4)
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Print a row for each size of fleet."""
    parser = argparse.ArgumentParser(prog="python -m bench.placement.decision", description=__doc__)
    parser.add_argument("--workers", default="8,64,256", help="prefill workers, as many as decode workers")
    parser.add_argument("--decisions", type=int, default=400)
    parser.add_argument("--changed", choices=("some", "all"), default="some")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    rows = [
        asyncio.run(run(int(n), decisions=options.decisions, all_changed=options.changed == "all"))
        for n in options.workers.split(",")
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    for row in rows:
        for what in ("place", "dispatch"):
            figures = ", ".join(f"{name} {value}" for name, value in row[what].items())
            print(f"{row['workers']:>8} workers, {row['changed']} changed: {what:<8} {figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The console with 100 workers, 10,000 sessions and 2,000 requests: what each answer has, and its size.

Sizes and counts are bounded here; `pytest -s` prints the milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import aiohttp

from libs.common.cluster.discovery import Fleet, InMemoryDiscovery
from libs.common.cluster.placement_record import Placement, SessionId
from libs.common.cluster.placements import InMemoryPlacements
from libs.common.cluster.worker_record import Role, Worker
from libs.common.http.admin_port import open_admin_port
from libs.common.http.admin_server import AdminServer
from libs.common.runtime.readiness import ProcessHealth
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.process_metrics import ProcessMetrics
from services.router.console.assembly import make_console
from services.router.console.fleet_view import RouterIdentity
from services.router.execution.sessions import Sessions
from services.router.operators.process_calls import ProcessCalls
from services.router.placement.policy import place
from services.router.placement.types import DecodeWorker, PlacementFleet, PlacementRequest, PrefillWorker
from services.router.recording.recorder import RequestRecorder
from slipstream.rpc.dial import Dial
from slipstream.v1 import common_pb2, worker_pb2

WORKERS, SESSIONS, REQUESTS = 100, 10_000, 2_500
KEPT, TABLE_ROWS, PAGE = 2_000, 64, 500
REPORT = worker_pb2.LoadReport(requests_running=7, blocks_free=100, blocks_cached=20, blocks_held=30)


class FakeLink:
    """A ready worker with one load report."""

    ready, draining, has_reported, report_age_s = True, False, True, 0.1
    fingerprint = common_pb2.Fingerprint(digest=b"x", block_tokens=64)
    report = REPORT

    def __init__(self, role: Role, number: int) -> None:
        self.worker = Worker(role, f"{role}-{number}", f"127.0.0.1:{10_000 + number}", f"i-{number}")


class FakeLinks:
    """A fleet of half prefill, half decode workers."""

    def __init__(self) -> None:
        self._links = [
            FakeLink(role, number) for role in (Role.PREFILL, Role.DECODE) for number in range(WORKERS // 2)
        ]

    def links(self) -> list[FakeLink]:
        return self._links

    def links_of(self, role: Role) -> list[FakeLink]:
        return [link for link in self._links if link.worker.role is role]

    def fingerprint(self) -> common_pb2.Fingerprint:
        return FakeLink.fingerprint


def fill(recorder: RequestRecorder) -> None:
    """Requests whose placements weighed all workers."""
    half = range(WORKERS // 2)
    fleet = PlacementFleet(
        tuple(PrefillWorker(f"prefill-{i}", queued_tokens=100 * i) for i in half),
        tuple(DecodeWorker(f"decode-{i}", context_tokens=100 * i) for i in half),
    )
    decision = place(PlacementRequest(2000), fleet)
    for number in range(REQUESTS):
        timeline = recorder.begin(
            f"req-{number}",
            began_s=0.0,
            tenant=f"tenant-{number % 7}",
            session=f"session-{number}",
            model="m",
            endpoint="Generate",
        )
        timeline.admitted(0.1)
        for attempt in (1, 2):
            timeline.placed(decision, attempt=attempt)
        for _ in range(2_000 if number > REQUESTS - 5 else 3):
            timeline.tokens(1.0, 1)
        timeline.ended()


@asynccontextmanager
async def large_console() -> AsyncIterator[tuple[aiohttp.ClientSession, RequestRecorder]]:
    clock = asyncio.get_running_loop().time
    placements, counters = InMemoryPlacements(), Counters()
    for number in range(SESSIONS):
        session = SessionId(f"tenant-{number % 7}", f"session-{number:05}")
        placements.put(session, Placement("kvstore-0", "prefill-1", "decode-2", 10, b"h"))
    recorder = RequestRecorder(clock=clock, wall_clock_s=time.time)
    fill(recorder)
    runs: Any = SimpleNamespace(
        context=SimpleNamespace(
            clock=clock,
            fleet=FakeLinks(),
            sessions=Sessions(placements),
            recorder=recorder,
            counters=counters,
        ),
        gate=SimpleNamespace(running=3, waiting=4),
        draining=False,
    )
    peers: Any = SimpleNamespace(reports=dict)
    identity = RouterIdentity("router-0", "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "m", clock())
    members = Fleet(InMemoryDiscovery())
    calls, chat = ProcessCalls(Dial(), None), cast(Any, None)
    console = make_console(identity, runs, members, peers, dial=Dial(), calls=calls, chat=chat, jobs=None)
    port = open_admin_port("127.0.0.1:0", secret=None)
    metrics = ProcessMetrics("router", counters, lambda _: {})
    server = AdminServer(
        port,
        metrics=metrics,
        read_health=ProcessHealth().read,
        routes=console.routes(),
        complete_headers=console.complete_headers,
    )
    await server.start()
    try:
        async with aiohttp.ClientSession(f"http://{port.endpoint}") as http:
            yield http, recorder
    finally:
        await console.close()
        await server.stop()


async def read(http: aiohttp.ClientSession, path: str) -> tuple[dict[str, Any], int]:
    """An answer and its size in bytes."""
    began_s = time.perf_counter()
    async with http.get(f"/console/api/{path}") as answer:
        body = await answer.read()
        assert answer.status == 200, body
        print(f"{path}: {(time.perf_counter() - began_s) * 1e3:.1f} ms, {len(body)} bytes")
        page: dict[str, Any] = await answer.json()
        return page, len(body)


async def test_every_answer_is_bounded() -> None:
    async with large_console() as (http, recorder):
        fleet, n_bytes = await read(http, "fleet")
        assert len(fleet["workers"]) == WORKERS and n_bytes < 100_000
        assert {(row["age_ms"], row["load"]["kv_blocks_total"]) for row in fleet["workers"]} == {(100, 150)}
        page, n_bytes = await read(http, f"requests?limit={PAGE}")
        assert (len(page["requests"]), page["total"], page["dropped"]) == (PAGE, KEPT, REQUESTS - KEPT)
        assert n_bytes < PAGE * 700
        none, n_bytes = await read(http, "requests?q=no-such-text")
        assert none["requests"] == [] and n_bytes < 200
        request, n_bytes = await read(http, f"requests/req-{REQUESTS - 1}")
        assert len(request["tokens"]["count"]) <= 512 and n_bytes < 80_000
        assert [len(each["candidates"]) for each in request["placements"]] == [TABLE_ROWS, TABLE_ROWS]
        assert request["placements"][0]["candidates_total"] >= WORKERS
        chosen = [row["part"] for row in request["placements"][0]["candidates"] if row["chosen"]]
        assert chosen == ["decode", "prefill"]
        assert recorder._candidates <= 100_000 and len(recorder._tables) <= 1_000
        oldest, n_bytes = await read(http, f"requests/req-{REQUESTS - KEPT}")
        assert oldest["placements"][0]["candidates"] == [] and oldest["placements"][0]["reasons"]
        assert oldest["placements"][0]["chosen"]["prefill"] and n_bytes < 10_000


async def test_all_sessions_are_reached_page_by_page_and_each_page_is_small() -> None:
    async with large_console() as (http, _):
        seen: list[tuple[str, str]] = []
        after: str | None = ""
        while after is not None:
            page, n_bytes = await read(http, f"cache?limit=200&sessions_after={after}")
            assert len(page["sessions"]["page"]) <= 200 and n_bytes < 60_000
            assert page["sessions"]["total"] == SESSIONS
            seen += [(row["tenant"], row["session"]) for row in page["sessions"]["page"]]
            after = page["sessions"]["next"]
        assert len(seen) == len(set(seen)) == SESSIONS and seen == sorted(seen)
        one, _ = await read(http, "cache?tenant=tenant-3&limit=5")
        assert one["sessions"]["total"] == len([1 for tenant, _ in seen if tenant == "tenant-3"])
        assert {row["tenant"] for row in one["sessions"]["page"]} == {"tenant-3"}
        async with http.get("/console/api/cache?sessions_after=odd") as answer:
            assert answer.status == 400

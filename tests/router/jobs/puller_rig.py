"""Pullers of jobs beside their tables, whose room, clock and executor the test sets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from libs.common.telemetry.counters import Counters
from services.router.jobs.decisions import Headroom
from services.router.jobs.puller import JobPuller
from services.router.jobs.types import ClaimedJob, JobOutcome, JobProgress
from tests.router.jobs.stores import DONE, JobTables

IDLE = Headroom(True, 0, 0, 8, 8)


class HeldExecutor:
    """Runs jobs until the test lets them end."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.ends: dict[str, asyncio.Future[JobOutcome]] = {}
        self.limits: list[int] = []

    async def check(self, tenant: str, path: str, body: bytes, field: str, *, n_bytes: int) -> int:
        return 0

    async def run(self, job: ClaimedJob) -> JobOutcome:
        self.begun.append((job.id, job.attempt))
        self.ends[job.id] = asyncio.get_running_loop().create_future()
        return await self.ends[job.id]

    def limit(self, n: int) -> None:
        self.limits.append(n)

    def progress(self) -> Mapping[str, JobProgress]:
        is_held = bool(self.limits) and not self.limits[-1]
        return dict.fromkeys(self.ends, JobProgress(3, is_held))

    def finish_all(self) -> None:
        for end in self.ends.values():
            if not end.done():
                end.set_result(DONE)


class PullerRig:
    """Tables, and pullers beside them whose room and clock the test sets."""

    def __init__(self, tables: JobTables) -> None:
        self.tables = tables
        self.room = IDLE
        self.times_asked = 0  # for the room, at least once a tick
        self.clock_s = 0.0
        self.counters = Counters()
        self.executor = HeldExecutor()
        self.pullers: list[JobPuller] = []

    def start(self, instance: str, executor: Any = None) -> JobPuller:
        puller = JobPuller(
            self.tables.leases,
            executor or self.executor,
            instance=instance,
            room=self._answer,
            clock=lambda: self.clock_s,
            wall_clock_s=lambda: self.tables.now_s,
            counters=self.counters,
            heartbeat_s=0.02,
            lease_s=10.0,
        )
        puller.start()
        self.pullers.append(puller)
        return puller

    def _answer(self) -> Headroom:
        self.times_asked += 1
        return replace(self.room, overdue=self.pullers[-1].overdue if self.pullers else 0)

    async def until_asked(self, times: int) -> None:
        """Return when the pullers have asked for the room so often from now on."""
        last = self.times_asked + times
        async with asyncio.timeout(30):
            while self.times_asked < last:
                await asyncio.sleep(0.01)

    async def until_states(self, **counts: int) -> None:
        async with asyncio.timeout(30):
            while True:
                seen = await self.tables.store.counts("alice")
                if all(getattr(seen, name) == count for name, count in counts.items()):
                    return
                await asyncio.sleep(0.01)

    async def until_limit(self, limit: int) -> None:
        async with asyncio.timeout(30):
            while not self.executor.limits or self.executor.limits[-1] != limit:
                await asyncio.sleep(0.01)

    async def until_begun(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.executor.begun) < count:
                await asyncio.sleep(0.01)

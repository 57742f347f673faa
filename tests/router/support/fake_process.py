"""The process of a fake worker, and its service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from libs.common.cluster.worker_service import WorkerProcess, WorkerService
from slipstream.v1 import worker_pb2


class MutableWorkerService(WorkerService):
    """A worker service whose load stream is silent while `load_gate` is cleared."""

    load_gate: asyncio.Event

    async def WatchLoad(self, request: Any, context: Any) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        async for response in super().WatchLoad(request, context):
            await self.load_gate.wait()
            yield response


class FakeProcess(WorkerProcess):
    """Reports the load that a test states, else none.

    Routers of tests know what they sent. A report that is late would count it as requests of other routers.
    """

    def __init__(self, held: set[str]) -> None:
        self._held = held
        self.stated_load: worker_pb2.LoadReport | None = None

    def load(self) -> worker_pb2.LoadReport:
        if self.stated_load is not None:
            report = worker_pb2.LoadReport()
            report.CopyFrom(self.stated_load)
            return report
        return worker_pb2.LoadReport()

    def ledger(self) -> worker_pb2.Ledger:
        return worker_pb2.Ledger(sequences=len(self._held))

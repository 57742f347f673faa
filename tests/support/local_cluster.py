"""A real local cluster for synchronous tests: its supervisor runs on a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

import grpc

from bench.ledgers import held
from libs.common.worker_record import Role
from slipstream.client import Client
from slipstream.supervisor.cluster import Cluster
from slipstream.supervisor.plan import ClusterConfig
from slipstream.v1 import worker_pb2, worker_pb2_grpc


def until(condition: Callable[[], object], *, timeout_s: float = 20.0, what: str = "condition") -> None:
    """Poll until `condition()` is true; AssertionError naming `what` at the deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


class LocalCluster:
    """`with LocalCluster(config) as cluster`: everything is ready inside, nothing is left outside."""

    def __init__(self, config: ClusterConfig) -> None:
        self.said: list[str] = []
        self.supervisor = Cluster(config, say=self.said.append)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> LocalCluster:
        self._thread.start()
        self.call(self.supervisor.__aenter__(), timeout_s=120)
        record = self.supervisor.record()
        self.grpc, self.http = record.router_grpc, record.router_http
        self.workers = {p.instance: p.endpoint for p in record.processes if p.role in set(Role)}
        self.routers = [p.endpoint for p in record.processes if p.role == "router"]
        self.client = Client(self.grpc, timeout_s=60)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self.call(self.supervisor.__aexit__(None, None, None), timeout_s=60)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def call(self, coroutine: Coroutine[Any, Any, Any], *, timeout_s: float = 30.0) -> Any:
        """Run a coroutine on the supervisor's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def pid(self, instance: str) -> int:
        """The process's pid now. Raises when it is down."""
        pid = self.supervisor.record().find(instance).pid
        assert pid is not None, f"{instance} is down"
        return pid

    def status(self, instance: str) -> worker_pb2.GetStatusResponse:
        """GetStatus of one worker."""
        with grpc.insecure_channel(self.workers[instance]) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            return stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=10)

    def state(self, instance: str) -> str:
        """How the supervisor sees the process now."""
        return self.supervisor.record().find(instance).state

    def held(self) -> dict[str, dict[str, int]]:
        """What any worker holds for somebody right now; empty when idle."""
        running = [instance for instance in self.workers if self.state(instance) != "drained"]
        return {instance: what for instance in running if (what := held(self.status(instance)))}

    def assert_idle(self) -> None:
        """Every ledger reads zero within the deadline."""
        until(lambda: not self.held(), what=f"ledgers empty; last {self.held()}")

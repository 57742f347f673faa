"""A real local cluster for synchronous tests; its supervisor runs on a loop in a separate thread.

All time-outs only end a test that hangs: the machine may be slow.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from bench.ledgers import held
from libs.common.cluster.worker_record import Role
from slipstream.client import Client
from slipstream.cluster_record import secret_file
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.peer_token import TokenMinter, TwoClocks
from slipstream.v1 import worker_pb2
from supervisor.configuration.plan import ClusterConfig
from supervisor.forking.launcher import ProcessLauncher
from tests.support.clusters.engine_gate import Gate
from tests.support.clusters.kept_channels import KeptChannels
from tests.support.clusters.supervised import supervised
from tests.support.processes.process_checks import alive

PATIENCE_S = 180.0
REQUEST_S = 300.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.2


def operator_tokens(run_dir: Path, wall_s: Callable[[], float]) -> TokenMinter:
    """The tokens of an operator of the cluster in the directory."""
    secret = ClusterSecret.from_file(secret_file(run_dir))
    return TokenMinter(secret, "tests", CallerClass.OPERATOR, clocks=TwoClocks(wall_s))


def until(
    condition: Callable[[], object], *, timeout_s: float = PATIENCE_S, what: str | Callable[[], str]
) -> None:
    """Poll until `condition()` is true; AssertionError with `what` at the deadline.

    A condition often asks every process, which costs more than the wait: the pauses grow."""
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what if isinstance(what, str) else what()}")
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


def _patient_restores(config: ClusterConfig) -> dict[Role, list[str]]:
    """Arguments that make restores wait long for KV; a test's own arguments follow and override."""
    patience = ["--restore-floor-ms", str(PATIENCE_S * 1e3)]
    return {role: [*patience, *config.extra_arguments.get(role, ())] for role in (Role.PREFILL, Role.DECODE)}


class LocalCluster:
    """`with LocalCluster(config) as cluster`: all processes are ready inside, and have ended after it."""

    def __init__(
        self,
        config: ClusterConfig,
        *,
        wall_s: Callable[[], float] = time.time,
        launcher: ProcessLauncher | None = None,
    ) -> None:
        """`wall_s`: the wall clock of the processes, by which they accept tokens. `launcher` starts them in
        place of the one of all tests."""
        self._wall_s = wall_s
        self.said: list[str] = []
        patient = replace(
            config,
            ready_timeout_s=max(config.ready_timeout_s, PATIENCE_S),
            extra_arguments={**config.extra_arguments, **_patient_restores(config)},
        )
        self.supervisor = supervised(patient, say=self.said.append, launcher=launcher)
        self.run_dir = config.run_dir
        self.gate = Gate(config.run_dir)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> LocalCluster:
        self._thread.start()
        self.call(self.supervisor.__aenter__(), timeout_s=2 * PATIENCE_S)
        record = self.supervisor.record()
        self.grpc, self.http = record.router_grpc, record.router_http
        self.workers = record.service_endpoints()
        self.admin_http = record.find("router-0").admin_http
        self._channels = KeptChannels(operator_tokens(self.run_dir, self._wall_s))
        self.routers = [p.endpoint for p in record.processes if p.role == "router"]
        self.router_names = [p.instance for p in record.processes if p.role == "router"]
        self.client = Client(self.grpc, timeout_s=REQUEST_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        self._channels.close()
        self.call(self.supervisor.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def call(self, coroutine: Coroutine[Any, Any, Any], *, timeout_s: float = PATIENCE_S) -> Any:
        """Run a coroutine on the supervisor's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout_s)

    def pid(self, instance: str) -> int:
        """The process's pid now. Raises when it is down."""
        pid = self.supervisor.record().find(instance).pid
        assert pid is not None, f"{instance} is down"
        return pid

    def status(self, instance: str) -> worker_pb2.GetStatusResponse:
        """GetStatus of one worker. Raises grpc.RpcError when it does not answer."""
        return self._channels.status(self.workers[instance])

    def sequences(self, instance: str) -> int:
        """The number of requests that the worker runs; 0 while it does not answer."""
        try:
            return self.status(instance).ledger.sequences
        except grpc.RpcError:
            return 0

    def counted(self, name: str) -> float:
        """The sum of a counter over all routers."""
        return sum(self.status(router).counters.get(name, 0.0) for router in self.router_names)

    def holds(self, instance: str) -> bool:
        """Whether the ledger of the process has entries; false while it does not answer."""
        try:
            return bool(held(self.status(instance)))
        except grpc.RpcError:
            return False

    def state(self, instance: str) -> str:
        """The supervisor's state of the process."""
        return self.supervisor.record().find(instance).state

    def running(self, instance: str, *, but: int = 0) -> bool:
        """Whether the process is ready and alive, with another pid than `but`.

        The supervisor's state alone is not enough: it lags behind the death of a process."""
        process = self.supervisor.record().find(instance)
        return process.state == "ready" and process.pid not in (None, but) and alive(process.pid)

    def until_running(self, *instances: str, but: int = 0) -> None:
        """Return when the named processes run; without names, all."""
        names = instances or tuple(process.instance for process in self.supervisor.record().processes)
        until(lambda: all(self.running(name, but=but) for name in names), what=f"{names} run")

    def until_logged(self, instance: str, words: str) -> list[str]:
        """Wait for a line with these words in the process's log; returns all such lines.

        The supervisor writes the file a moment after the process wrote its line."""
        log = self.run_dir / "logs" / f"{instance}.log"
        found: list[str] = []

        def is_logged() -> bool:
            found[:] = [line for line in log.read_text(errors="replace").splitlines() if words in line]
            return bool(found)

        until(is_logged, what=f"{words!r} in {log.name}")
        return found

    def held(self) -> dict[str, dict[str, int]]:
        """The ledgers with entries, by worker; empty when all are idle. A worker without an answer counts."""
        found: dict[str, dict[str, int]] = {}
        for instance in self.workers:
            if self.state(instance) != "drained":
                try:
                    what = held(self.status(instance))
                except grpc.RpcError:
                    what = {"unavailable": 1}
                found |= {instance: what} if what else {}
        return found

    def assert_idle(self) -> None:
        """Wait until every ledger is empty."""
        until(lambda: not self.held(), what=lambda: f"ledgers empty; last {self.held()}")

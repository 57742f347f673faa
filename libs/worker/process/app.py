"""The part of a worker process that depends on its role; `process.py` is the common part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import grpc

from libs.common.cluster.discovery import Discovery
from libs.common.cluster.fingerprint import Fingerprint
from libs.common.telemetry.counters import Counters
from libs.engine.step.load_progress import LoadProgress
from libs.worker.process.settings import WorkerSettings
from slipstream.v1 import worker_pb2


class WorkerApp(ABC):
    """`open`, `register`, `drain` and `undrain` in turn, `close`; the others at any time.

    The attributes but `counters` and `progress` are valid after `open`.
    """

    service_name = ""

    def __init__(self, options: WorkerSettings) -> None:
        self.options = options
        self.broken = False  # it cannot serve any more: the process must be replaced
        self._stop: Callable[[], None] = lambda: None  # ends the process; set by `open`
        self.counters = Counters()
        self.transport_kind = "none"
        self.fingerprint: Fingerprint | None = None  # None without KV
        self.record_fingerprint = b""  # for discovery
        self.session_digest = ""  # of the transport session, for discovery
        self.capacity: Mapping[str, int] = {}
        self.progress = LoadProgress()  # of `open`

    @abstractmethod
    async def open(self, endpoint: str, discovery: Discovery, stop: Callable[[], None]) -> None:
        """Load and warm up. `stop` ends the process when the worker finds itself broken."""

    def end_broken(self) -> None:
        """End the process: the worker cannot serve any more."""
        self.broken = True
        self._stop()

    @abstractmethod
    def register(self, server: grpc.aio.Server, load_changed: Callable[[], None]) -> None:
        """Add the servicer. `load_changed` is to be called after whatever changes load or ledger."""

    @abstractmethod
    def load(self) -> worker_pb2.LoadReport:
        """Load as the router sees it."""

    @abstractmethod
    def ledger(self) -> worker_pb2.Ledger:
        """The worker's holdings for requests."""

    @abstractmethod
    def measure(self) -> Mapping[str, float]:
        """Gauges by metric name, also before `open` is done; those with labels it sets in `counters`."""

    @abstractmethod
    async def drain(self) -> None:
        """Refuse new work."""

    @abstractmethod
    def undrain(self) -> None:
        """Accept new work again, after `drain`."""

    @abstractmethod
    async def close(self) -> None:
        """End everything. Also after a failed `open`."""

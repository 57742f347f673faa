"""A process without work, and its WorkerService."""

from __future__ import annotations

from libs.common.cluster.worker_service import WorkerIdentity, WorkerProcess, WorkerService
from slipstream.v1 import worker_pb2


class IdleProcess(WorkerProcess):
    """Reports the `report` and the `held` that a test sets."""

    def __init__(
        self, report: worker_pb2.LoadReport | None = None, held: worker_pb2.Ledger | None = None
    ) -> None:
        self.report = report or worker_pb2.LoadReport()
        self.held = held or worker_pb2.Ledger()

    def load(self) -> worker_pb2.LoadReport:
        report = worker_pb2.LoadReport()
        report.CopyFrom(self.report)
        return report

    def ledger(self) -> worker_pb2.Ledger:
        return self.held


def idle_service(role: str = "kvstore") -> WorkerService:
    """The WorkerService of such a process."""
    return WorkerService(WorkerIdentity(role, f"{role}-0"), IdleProcess())

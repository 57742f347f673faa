"""The owner of a single connection."""

from __future__ import annotations

from services.router.workers.connection import WorkerConnection
from slipstream.v1 import common_pb2, worker_pb2


class AnyWorker:
    """Accepts every worker, and does nothing when it reports."""

    def fits(self, fingerprint: common_pb2.Fingerprint) -> bool:
        return True

    def readiness_changed(self) -> None:
        return

    def reported(self, link: WorkerConnection, report: worker_pb2.LoadReport) -> None:
        return

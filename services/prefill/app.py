"""The prefill worker: engine, handoffs and their service in one process."""

from __future__ import annotations

import grpc

from libs.worker.process.core import WorkerCore
from libs.worker.process.engine_app import EngineApp
from services.prefill.service import PrefillService
from slipstream.v1 import kvstore_pb2_grpc, prefill_pb2_grpc


class PrefillApp(EngineApp):
    """See `libs.worker.process.engine_app`."""

    service_name = "slipstream.v1.PrefillService"
    _servicer: PrefillService

    def make_service(self, core: WorkerCore, endpoint: str) -> PrefillService:
        self._servicer = PrefillService(core, endpoint=endpoint)
        self._servicer.start()
        return self._servicer

    def add_servicer(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self._servicer, server)
        assert self.core is not None
        kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(self.core.lender, server)

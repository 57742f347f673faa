"""The prefill worker: engine, handoffs and their service in one process."""

from __future__ import annotations

import grpc

from libs.common.cluster.discovery import Discovery
from libs.worker.engine.engine_thread import DraftSource
from libs.worker.process.core import WorkerCore
from libs.worker.process.engine_app import EngineApp
from libs.worker.process.settings import EngineSettings
from services.prefill.feature_demand import FeatureDemand
from services.prefill.service import PrefillService
from slipstream.v1 import kvstore_pb2_grpc, prefill_pb2_grpc


class PrefillApp(EngineApp):
    """See `libs.worker.process.engine_app`."""

    service_name = "slipstream.v1.PrefillService"
    _servicer: PrefillService

    def __init__(self, options: EngineSettings) -> None:
        super().__init__(options)
        self._demand = FeatureDemand()

    async def make_draft_source(self, discovery: Discovery) -> DraftSource | None:
        return self._demand

    def make_service(self, core: WorkerCore, endpoint: str) -> PrefillService:
        self._servicer = PrefillService(core, endpoint=endpoint, demand=self._demand)
        self._servicer.start()
        return self._servicer

    def add_servicer(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self._servicer, server)
        assert self.core is not None
        kvstore_pb2_grpc.add_KvstoreServiceServicer_to_server(self.core.lender, server)

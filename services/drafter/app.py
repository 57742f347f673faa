"""The drafter: one head, its thread and its service in one process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping

import grpc

from libs.common.checksum import KvChecksum
from libs.common.cluster.address_book import open_address_book
from libs.common.cluster.discovery import Discovery
from libs.common.transport.open import open_transport
from libs.engine.core.fake_head import FakeHead
from libs.engine.step.draft_head import DraftHead
from libs.engine.step.types import FEATURE_WINDOW_TOKENS
from libs.worker.engine.feature_memory import FeatureMemory, FeatureReader
from libs.worker.process.app import WorkerApp
from libs.worker.process.identity import head_fingerprint
from libs.worker.process.model_unusable import unusable_models
from libs.worker.process.settings import WorkerSettings, require_models
from libs.worker.requests.messages import FEATURE_BYTES
from services.drafter.batcher import Batcher
from services.drafter.service import DrafterService
from slipstream.errors import FailedPrecondition, TransferError
from slipstream.rpc.hosts import host_of
from slipstream.v1 import drafter_pb2_grpc, worker_pb2

log = logging.getLogger(__name__)


class DrafterApp(WorkerApp):
    """Has no KV, and so no fingerprint. Its transport only reads."""

    service_name = "slipstream.v1.DrafterService"

    def __init__(self, options: WorkerSettings) -> None:
        """Raises InvalidArgument for a head without its files."""
        super().__init__(options)
        require_models(options, "model", "draft_model")
        self._batcher = Batcher(self._load_head, on_broken=self.end_broken)
        self._service: DrafterService | None = None
        self._stack = contextlib.AsyncExitStack()

    def _load_head(self) -> DraftHead:
        options = self.options
        if options.engine == "fake":
            return FakeHead()
        assert options.draft_model is not None and options.model is not None
        from libs.engine.core.build import build_drafter

        with unusable_models(self.options):
            return build_drafter(
                options.draft_model, options.model, threads=options.threads, device=options.device
            )

    async def open(self, endpoint: str, discovery: Discovery, stop: Callable[[], None]) -> None:
        self._stop = stop
        head = await self._batcher.start()
        self.record_fingerprint = head_fingerprint(head.digest)
        self.capacity = {"feature_width": head.feature_width}
        self._service = DrafterService(
            self._batcher,
            feature_width=head.feature_width,
            counters=self.counters,
            reader=await self._open_reader(endpoint, discovery, head.feature_width),
        )

    async def _open_reader(
        self, endpoint: str, discovery: Discovery, feature_width: int
    ) -> FeatureReader | None:
        """What reads features that decode workers export. Where no transport opens they travel in messages,
        which costs speed only."""
        options, transport = self.options, None
        try:
            transport = open_transport(
                options.transport,
                host_of(endpoint),
                bind=options.kv_bind(),
                advertise=options.kv_advertise,
                serves=False,
            )
            memory = FeatureMemory(
                transport,
                slot_bytes=FEATURE_WINDOW_TOKENS * FEATURE_BYTES * feature_width,
                checksum=KvChecksum.of_cluster(options.cluster_secret()),
                exports=False,
            )
        except (FailedPrecondition, TransferError) as error:
            log.warning("draft features travel in messages, without a transport: %s", error.message)
            if transport is not None:  # it takes no memory, as where the kernel locks none
                await transport.close()
            return None
        self._stack.push_async_callback(transport.close)
        self.transport_kind = transport.kind
        addresses = await open_address_book(discovery, self._stack)
        return FeatureReader(transport, memory, addresses, self.counters)

    def register(self, server: grpc.aio.Server, load_changed: Callable[[], None]) -> None:
        assert self._service is not None
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self._service, server)

    def load(self) -> worker_pb2.LoadReport:
        assert self._service is not None
        return self._service.load()

    def ledger(self) -> worker_pb2.Ledger:
        assert self._service is not None
        return self._service.ledger()

    def measure(self) -> Mapping[str, float]:
        if self._service is None:
            return {}
        return {"slipstream_requests_running": self._batcher.sequences}

    async def drain(self) -> None:
        if self._service is not None:
            await self._service.drain()

    def undrain(self) -> None:
        if self._service is not None:
            self._service.undrain()

    async def close(self) -> None:
        await self._batcher.stop()
        await self._stack.aclose()

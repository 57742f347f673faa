"""The app of a worker that owns an engine: what prefill and decode have in common."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

import grpc

from libs.common.checksum import KvChecksum
from libs.common.cluster.address_book import open_address_book, session_digest
from libs.common.cluster.discovery import Discovery
from libs.common.transport.open import open_transport
from libs.engine.step.types import Engine
from libs.worker.engine.engine_thread import DraftSource
from libs.worker.process.app import WorkerApp
from libs.worker.process.core import WorkerCore
from libs.worker.process.identity import worker_fingerprint
from libs.worker.process.model_unusable import unusable_sizes
from libs.worker.process.settings import (
    DecodeStepsName,
    EngineSettings,
    check_ranks,
    engine_builder,
    require_models,
)
from libs.worker.process.warm_up import warm_up
from slipstream.rpc.hosts import host_of
from slipstream.v1 import kv_events_pb2_grpc, worker_pb2


class EngineService(Protocol):
    """The gRPC service of one kind of worker."""

    def load(self) -> worker_pb2.LoadReport: ...

    def ledger(self) -> worker_pb2.Ledger: ...

    async def drain(self) -> None: ...

    def undrain(self) -> None: ...

    async def close(self) -> None: ...


class EngineApp(WorkerApp):
    """Subclasses make the service."""

    options: EngineSettings
    # Whether steps compute draft features where this worker has no source of drafts: for decode workers.
    wants_features = True

    def __init__(self, options: EngineSettings) -> None:
        """Raises InvalidArgument for an engine without a model, ModelUnusable for ranks that none runs."""
        super().__init__(options)
        require_models(options, "model")
        check_ranks(options, self.decode_steps)
        self._stack = contextlib.AsyncExitStack()
        self.core: WorkerCore | None = None
        self.service: EngineService | None = None

    @property
    def decode_steps(self) -> DecodeStepsName:
        """How steps of decode rows run; prefill has no other."""
        return "plain"

    async def make_draft_source(self, discovery: Discovery) -> DraftSource | None:
        """The source of drafts; prefill needs none."""
        return None

    def make_builder(self) -> Callable[[], Engine]:
        """The builder of the engine, on the thread that will own it; called after `make_draft_source`."""
        return engine_builder(self.options, self.progress)

    @abstractmethod
    def make_service(self, core: WorkerCore, endpoint: str) -> EngineService:
        """The servicer, not yet registered."""

    @abstractmethod
    def add_servicer(self, server: grpc.aio.Server) -> None:
        """Register the servicer."""

    async def open(self, endpoint: str, discovery: Discovery, stop: Callable[[], None]) -> None:
        self._stop = stop
        options = self.options
        transport = open_transport(
            options.transport, host_of(endpoint), bind=options.kv_bind(), advertise=options.kv_advertise
        )
        draft_source = await self.make_draft_source(discovery)
        core = WorkerCore(
            self.make_builder(),
            transport,
            instance=options.instance,
            dial=options.dial(),
            addresses=await open_address_book(discovery, self._stack),
            draft_source=draft_source,
            wants_features=self.wants_features,
            on_broken=self.end_broken,
            restore_floor_ms=options.restore_floor_ms,
            checksum=KvChecksum.of_cluster(options.cluster_secret()),
            counters=self.counters,
            kv_registration=options.kv_registration,
            kv_staging_bytes=options.kv_staging_bytes,
            model_dir=options.model,
        )
        self.core = core
        model_dir = options.model if options.engine == "torch" else None
        with unusable_sizes(options):
            await core.open(
                lambda info: worker_fingerprint(info, model_dir),
                max_waiting=options.max_waiting,
                max_running=4 * options.max_batch,
            )
            await core.thread.call(warm_up)
        self.fingerprint = core.fingerprint
        self.record_fingerprint = core.fingerprint.digest
        self.transport_kind = transport.kind
        self.session_digest = session_digest(transport.session_id)
        self.capacity = {
            "kv_blocks": core.info.n_pages,
            "block_tokens": core.info.block_tokens,
            "block_bytes": core.info.page_bytes,
            "max_batch": core.info.max_batch,
            "max_context_tokens": core.info.max_context_tokens,
        }
        self.service = self.make_service(core, endpoint)

    def register(self, server: grpc.aio.Server, load_changed: Callable[[], None]) -> None:
        assert self.core is not None
        self.core.load_changed = load_changed
        kv_events_pb2_grpc.add_KvEventServiceServicer_to_server(self.core.events, server)
        self.add_servicer(server)

    def load(self) -> worker_pb2.LoadReport:
        assert self.service is not None
        return self.service.load()

    def ledger(self) -> worker_pb2.Ledger:
        assert self.service is not None
        return self.service.ledger()

    def measure(self) -> Mapping[str, float]:
        loaded = {
            "slipstream_weights_loaded_bytes": self.progress.done_bytes,
            "slipstream_weights_total_bytes": self.progress.total_bytes,
        }
        return {**loaded, **self.core.measure()} if self.core is not None else loaded

    async def drain(self) -> None:
        if self.service is not None:
            await self.service.drain()

    def undrain(self) -> None:
        if self.service is not None:
            self.service.undrain()

    async def close(self) -> None:
        if self.service is not None:
            await self.service.close()
        if self.core is not None:
            await self.core.close()
        await self._stack.aclose()

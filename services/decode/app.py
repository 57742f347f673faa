"""The decode worker: engine, sequences and drafts in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import grpc

from libs.common.cluster.discovery import Discovery, Fleet
from libs.common.cluster.worker_record import Role, Worker
from libs.engine.step.draft_head import MAX_DRAFT_TOKENS
from libs.engine.step.types import Engine
from libs.worker.engine.engine_thread import DraftSource
from libs.worker.process.core import WorkerCore
from libs.worker.process.engine_app import EngineApp
from libs.worker.process.identity import head_fingerprint
from libs.worker.process.settings import DecodeStepsName, engine_builder, load_local_head
from services.decode.draft_exports import DraftExports
from services.decode.draft_gate import AHEAD_FEATURE_FACTOR, DraftGate, GateLimits
from services.decode.draft_state import DraftLimits
from services.decode.local_speculation import LocalSpeculation
from services.decode.service import DecodeService
from services.decode.settings import LOCAL, SERVICE, DecodeSettings
from services.decode.speculation import RemoteSpeculation
from slipstream.v1 import decode_pb2_grpc


class DecodeApp(EngineApp):
    """See `libs.worker.process.engine_app`."""

    service_name = "slipstream.v1.DecodeService"
    options: DecodeSettings
    wants_features = False
    _servicer: DecodeService
    _speculation: RemoteSpeculation | LocalSpeculation | None = None
    _fleet: Fleet | None = None

    @property
    def decode_steps(self) -> DecodeStepsName:
        return cast(DecodeStepsName, self.options.decode_steps)

    async def make_draft_source(self, discovery: Discovery) -> DraftSource | None:
        """The source of drafts; None where flags or the lack of a draft head rule them out.

        Otherwise DraftControl decides for each step.
        """
        options = self.options
        has_head = options.draft_model is not None or options.engine == "fake"
        if options.draft_tokens < 1 or options.drafts == "off" or not has_head:
            return None
        limits = GateLimits()
        if options.decode_steps == "ahead":
            limits = replace(limits, most_feature_factor=AHEAD_FEATURE_FACTOR)
        gate = DraftGate(limits, is_forced=options.drafts == "on")
        if options.drafter == LOCAL:
            self._speculation = LocalSpeculation(draft_tokens=options.draft_tokens, gate=gate)
            return self._speculation
        self._fleet = await Fleet(discovery).__aenter__()
        waits = DraftLimits(draft_tokens=options.draft_tokens, wait_cap_ms=options.draft_budget_ms)
        self._speculation = RemoteSpeculation(self._find_drafter, waits, gate=gate, dial=options.dial())
        return self._speculation

    def make_builder(self) -> Callable[[], Engine]:
        local = self._speculation
        build = engine_builder(
            self.options,
            self.progress,
            decode_steps=self.decode_steps,
            max_draft_tokens=self._max_draft_tokens(),
            has_local_head=isinstance(local, LocalSpeculation),
        )
        if not isinstance(local, LocalSpeculation):
            return build

        def build_both() -> Engine:
            engine = build()
            local.load(load_local_head(self.options, engine))
            return engine

        return build_both

    def make_service(self, core: WorkerCore, endpoint: str) -> DecodeService:
        speculation = self._speculation if core.info.feature_width else None
        if isinstance(speculation, RemoteSpeculation):
            speculation.exports = DraftExports(
                core.features, core.transport, self.counters, least_bytes=self.options.draft_export_bytes
            )
        if speculation is not None:
            speculation.start()
        self._servicer = DecodeService(core, speculation)
        return self._servicer

    def add_servicer(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self._servicer, server)

    async def close(self) -> None:
        await super().close()
        if self._speculation is not None:
            await self._speculation.close()
        if self._fleet is not None:
            await self._fleet.__aexit__(None, None, None)

    def _max_draft_tokens(self) -> int:
        """0 without a source of drafts: then no step has room for them."""
        return 0 if self._speculation is None else min(self.options.draft_tokens, MAX_DRAFT_TOKENS)

    async def _find_drafter(self) -> str | None:
        """The configured drafter, else one in discovery whose record names this worker's draft head."""
        if self.options.drafter not in ("", SERVICE):
            return self.options.drafter
        assert self._fleet is not None
        assert self.core is not None
        drafters = self._fleet.current.with_role(Role.DRAFTER)
        head = head_fingerprint(self.core.fingerprint.drafter)
        fitting = [worker for worker in drafters if worker.fingerprint == head]
        if not fitting:
            return None
        # Decode workers spread over the drafters, each with another first choice.
        chosen: Worker = fitting[sum(self.options.instance.encode()) % len(fitting)]
        return chosen.endpoint

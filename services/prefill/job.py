"""One prompt on its way to KV blocks and a first token, and its pages until the handoff ends."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from functools import partial

from libs.common.telemetry import tracing
from libs.engine.step.device_rows import host_rows
from libs.engine.step.types import FloatArray, FullBlock, PageReservation, StepOutput
from libs.worker.engine.feature_memory import ExportedFeatures
from libs.worker.process.core import WorkerCore
from libs.worker.requests.clock import until
from libs.worker.requests.messages import (
    add_cached_tokens,
    finish_reason,
    pack_features,
    position_logprobs,
    prompt_logprobs,
)
from libs.worker.requests.sequence_task import SequenceTask
from libs.worker.restore.block_fetcher import FetchStats
from services.prefill.feature_demand import FeatureDemand
from services.prefill.handoff_export import HandoffExport
from services.prefill.handoff_registry import HandoffRegistry
from services.prefill.plan import PrefillPlan
from slipstream.enum_names import TRANSPORTS
from slipstream.errors import Aborted, Internal, SlipstreamError
from slipstream.v1 import common_pb2, prefill_pb2

log = logging.getLogger(__name__)

# A prompt that waits longer for its pages has its prefix brought into the store's memory.
PREFETCH_AFTER_S = 0.005


class PrefillJob(SequenceTask):
    """See `SequenceTask`; the caller reads `events`."""

    def __init__(
        self,
        core: WorkerCore,
        handoffs: HandoffRegistry,
        demand: FeatureDemand,
        plan: PrefillPlan,
        *,
        endpoint: str,
    ) -> None:
        super().__init__(f"prefill {plan.key}", request_id=plan.key.request_id)
        self.plan = plan
        self.handoff_id = ""
        # Events of the Prefill stream; None after the last one, when `error` is set or the prompt succeeded.
        self.events: asyncio.Queue[prefill_pb2.PrefillEvent | None] = asyncio.Queue()
        self.error: SlipstreamError | None = None
        self._core = core
        self._handoffs = handoffs
        self._demand = demand
        self._endpoint = endpoint
        self._outputs: asyncio.Queue[StepOutput | SlipstreamError] = asyncio.Queue()
        self._pages: Sequence[int] = ()
        self._export: HandoffExport | None = None
        self._export_task: asyncio.Task[None] | None = None
        self._features: ExportedFeatures | None = None
        self._cached: list[common_pb2.CachedTokens] = []
        self._arrived = time.perf_counter()
        self._complete = False
        self._draft_rows = 0  # that a reader needs
        self.tokens_left = plan.spec.context_tokens  # to compute; for the load report

    def start(self) -> asyncio.Task[None]:
        task = super().start()
        # However the task ended, there are no more events.
        task.add_done_callback(lambda _: self.events.put_nowait(None))
        return task

    # ---- OutputHandler

    def on_output(self, output: StepOutput) -> None:
        self._outputs.put_nowait(output)

    def on_error(self, error: SlipstreamError) -> None:
        self._outputs.put_nowait(error)

    # ---- HandoffExporter

    def on_watched(self, first_block: int, draft_rows: int) -> None:
        self._demand.record(self.plan.decode_instance, draft_rows)
        self._draft_rows = max(self._draft_rows, draft_rows)
        self._core.thread.want_features(self.plan.spec.seq_id, wanted=self._draft_rows > 0)
        if self._export is not None:
            self._export.on_watched(first_block)

    def on_read(self, blocks: Sequence[int]) -> None:
        if self._export is not None:
            self._export.on_read(blocks)

    # ---- the task

    async def _run(self) -> None:
        try:
            async with until(self.plan.deadline_s):
                await self._serve()
            await asyncio.get_running_loop().create_future()  # until `end`
        except asyncio.CancelledError:
            if not self._complete:
                self._fail(self._end_error or Aborted(f"{self.plan.key} was ended"))
        except SlipstreamError as error:
            self._fail(error)
        except Exception:
            log.exception("%s failed", self.plan.key)
            self._fail(Internal("internal error"))
        finally:
            self._cleaning_up = True
            self.tokens_left = 0
            if self._export_task is not None and self._export is not None:
                self._export_task.cancel()
                await asyncio.wait({self._export_task})
                self._export.close()
            if self._features is not None:
                self._core.features.release(self._features)
            await self._core.release(self.plan.spec.seq_id, self._pages)

    def _fail(self, error: SlipstreamError) -> None:
        self._ending = True  # from here on `end` has nothing to stop
        self.error = error
        self.events.put_nowait(None)
        if self.handoff_id:
            self._handoffs.fail(self.handoff_id, error)

    async def _serve(self) -> None:
        spec, core = self.plan.spec, self._core
        constraint = core.grammars.begin(spec)
        reservation = await self._reserve()
        self._pages = reservation.pages
        wanted = self._demand.predict(self.plan.decode_instance)  # until the reader has asked
        core.thread.want_features(spec.seq_id, wanted=wanted)
        started = time.perf_counter()
        core.counters.observe("slipstream_pages_wait_seconds", started - self._arrived)
        n_blocks = -(-spec.context_tokens // core.info.block_tokens)
        self._note_cached(
            [common_pb2.CACHE_TIER_WORKER] * (reservation.cached_tokens // core.info.block_tokens)
        )
        self._open(n_blocks)
        self._advance(reservation.cached_tokens // core.info.block_tokens)
        # What the pages hold already is no load; the store may spare more of it.
        self.tokens_left = spec.context_tokens - reservation.cached_tokens
        filled = await self._restore(reservation)
        self.tokens_left = spec.context_tokens - filled
        self._offer_known(filled // core.info.block_tokens)
        core.attach(spec.seq_id, self, computed_tokens=filled, prefilling=True)
        ready = await constraint
        await core.thread.call(lambda engine: engine.start(spec.seq_id, constraint=ready))
        last = await self._follow()
        # The client's first token does not wait for the export of the last blocks.
        self._send_first_token(last, queue_ms=(started - self._arrived) * 1e3, started=started)
        span = tracing.exported_context()
        core.counters.observe("slipstream_prefill_seconds", time.perf_counter() - started, span=span)
        self._advance(n_blocks)
        if last.finish is None and self._export_task is not None:
            await self._export_task
        self._finish(last)

    async def _reserve(self) -> PageReservation:
        """Pages; when they are long in coming, the store reads the prefix from its disks meanwhile."""
        hint = asyncio.get_running_loop().call_later(PREFETCH_AFTER_S, self._prefetch)
        try:
            return await self._core.pages.reserve(self.plan.spec)
        finally:
            hint.cancel()

    def _prefetch(self) -> None:
        hashes = self.plan.spec.restorable_hashes(self._core.info.block_tokens)
        self._core.restorer.prefetch(self.plan.kvstore_endpoint, hashes)

    def _open(self, n_blocks: int) -> None:
        handoff_id = secrets.token_hex(16)
        lease_ms = self._handoffs.open(
            handoff_id, self, self.plan.key, n_blocks=n_blocks, lease_ms=self.plan.lease_ms
        )
        self.handoff_id = handoff_id
        self._export = HandoffExport(
            self._core.exporter,
            self._pages[:n_blocks],
            # Without a reference to this job: a cycle would keep the prompt until a garbage collection.
            partial(self._handoffs.publish, handoff_id),
        )
        self._export_task = asyncio.create_task(self._export.run(), name=f"export {self.plan.key}")
        self._export_task.add_done_callback(self._on_exported)
        ticket = prefill_pb2.HandoffTicket(
            handoff_id=handoff_id,
            attempt=common_pb2.Attempt(request_id=self.plan.key.request_id, attempt=self.plan.key.attempt),
            fingerprint=self._core.fingerprint.to_proto(),
            control_endpoint=self._endpoint,
            transport=TRANSPORTS.value(self._core.transport.kind),
            transport_session=self._core.transport.session_id,
            blocks=[prefill_pb2.ExportedBlock(n_bytes=self._core.memory.page_bytes)] * n_blocks,
            prompt_tokens=self.plan.spec.context_tokens,
            lease_ms=lease_ms,
        )
        opened = prefill_pb2.HandoffOpened(ticket=ticket.SerializeToString(), cached=self._cached)
        self.events.put_nowait(prefill_pb2.PrefillEvent(opened=opened))

    async def _restore(self, reservation: PageReservation) -> int:
        """Restore blocks beyond the own cache from the peer, then the kvstore. Returns the tokens with KV."""
        spec, block_tokens = self.plan.spec, self._core.info.block_tokens
        first = reservation.cached_tokens // block_tokens
        usable = spec.restorable_hashes(block_tokens)
        found = await self._core.restorer.restore_prefix(
            (self.plan.peer_endpoint, self.plan.kvstore_endpoint),
            usable,
            reservation.pages,
            first_block=first,
            stats=FetchStats(),
            salt=spec.salt,
            block_ms=self._core.stats.block_ms(block_tokens),
        )
        filled = (first + len(found.tiers)) * block_tokens
        if found.tiers:
            await self._core.thread.receive(spec.seq_id, filled)
            await self._core.thread.call(lambda engine: engine.fill(spec.seq_id, filled))
            self._note_cached(found.tiers)
            self._advance(first + len(found.tiers))
        if found.late is not None:
            self._move(await self._core.spare_late_pages(reservation, found))
        return filled

    def _move(self, reservation: PageReservation) -> None:
        """Note that some blocks of the handoff, none of them final, are in other pages now."""
        assert self._export is not None
        self._pages = reservation.pages
        self._export.pages = reservation.pages[: len(self._export.pages)]

    def _offer_known(self, n_blocks: int) -> None:
        """Blocks that were cached here: the store may have lost them; it takes what it lacks."""
        own_tokens = sum(c.tokens for c in self._cached if c.tier == common_pb2.CACHE_TIER_WORKER)
        n_own = min(own_tokens // self._core.info.block_tokens, n_blocks)
        known = zip(self.plan.spec.block_hashes[:n_own], self._pages, strict=False)
        blocks = [FullBlock(*pair) for pair in known]
        self._offer(blocks)

    def _offer(self, blocks: Sequence[FullBlock]) -> None:
        self._core.writer.offer(
            self.plan.kvstore_endpoint,
            blocks,
            salt=self.plan.spec.salt,
            trace=tracing.trace_metadata(),
        )

    async def _follow(self) -> StepOutput:
        """Publish block after block while the engine computes; returns the output with the first token."""
        while True:
            output = await self._outputs.get()
            if isinstance(output, SlipstreamError):
                raise output
            if output.failure is not None:
                raise output.failure
            self.tokens_left = max(self.plan.spec.context_tokens - output.computed_tokens, 0)
            self._offer(output.new_full_blocks)
            n_shared = output.shared_tokens // self._core.info.block_tokens
            self._note_cached([common_pb2.CACHE_TIER_WORKER] * n_shared)
            progress = prefill_pb2.PrefillProgress(computed_tokens=output.computed_tokens)
            self.events.put_nowait(prefill_pb2.PrefillEvent(progress=progress))
            for piece in prompt_logprobs(output.scores) if output.scores is not None else ():
                self.events.put_nowait(prefill_pb2.PrefillEvent(prompt_logprobs=piece))
            if output.tokens:
                return output
            self._advance(output.computed_tokens // self._core.info.block_tokens)

    def _advance(self, n_blocks: int) -> None:
        """Blocks up to `n_blocks` hold their final bytes."""
        assert self._export is not None
        self._export.advance(n_blocks)

    def _on_exported(self, exporting: asyncio.Task[None]) -> None:
        """Fail the prompt where an export failed."""
        if exporting.cancelled() or (error := exporting.exception()) is None:
            return
        if not isinstance(error, SlipstreamError):
            log.error("%s: the export failed", self.plan.key, exc_info=error)
            error = Internal("internal error")
        self._outputs.put_nowait(error)

    def _send_first_token(self, last: StepOutput, *, queue_ms: float, started: float) -> None:
        first_token = prefill_pb2.FirstToken(
            token_id=last.tokens[0],
            finish_reason=finish_reason(last.finish),
            cached=self._cached,
            queue_ms=queue_ms,
            compute_ms=(time.perf_counter() - started) * 1e3,
            is_closing=last.is_closing,
        )
        if last.logprobs:
            first_token.logprobs.CopyFrom(position_logprobs(last.logprobs[0]))
        self.events.put_nowait(prefill_pb2.PrefillEvent(first_token=first_token))
        self.events.put_nowait(None)

    def _finish(self, last: StepOutput) -> None:
        self._complete = True
        complete = prefill_pb2.HandoffComplete(
            first_token_id=last.tokens[0],
            finish_reason=finish_reason(last.finish),
            is_closing=last.is_closing,
        )
        if last.features is not None and last.finish is None and self._draft_rows:
            first = max(len(last.features) - self._draft_rows, 0)
            self._export_features(complete, last.feature_start + first, host_rows(last.features)[first:])
        self._handoffs.complete(self.handoff_id, complete)

    def _export_features(
        self, complete: prefill_pb2.HandoffComplete, start_position: int, features: FloatArray
    ) -> None:
        """Let the reader have features [rows, width] of consecutive positions, if there is room."""
        self._features = exported = self._core.features.export(pack_features(features))
        if exported is not None:
            complete.draft_features.start_position = start_position
            complete.draft_features.rows, complete.draft_features.width = features.shape
            complete.draft_features.address = exported.address
            complete.draft_features.checksum = exported.checksum

    def _note_cached(self, tiers: Sequence[common_pb2.CacheTier.ValueType]) -> None:
        add_cached_tokens(self._cached, tiers, self._core.info.block_tokens)

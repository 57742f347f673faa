"""One sequence on this worker: from its start to its last token, and everything it holds meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
from opentelemetry.trace import Span

from libs.common.telemetry import tracing
from libs.engine.step.draft_head import ContextRows
from libs.engine.step.types import Engine, PageReservation, StepOutput
from libs.worker.engine.feature_memory import ExportedFeatures
from libs.worker.process.core import WorkerCore
from libs.worker.requests.clock import until
from libs.worker.requests.messages import (
    FEATURE_BYTES,
    Features,
    add_cached_tokens,
    finish_reason,
    parse_bfloat16,
    position_logprobs,
    prompt_logprobs,
)
from libs.worker.requests.request_spec import pack_tokens
from libs.worker.requests.sequence_task import SequenceTask
from libs.worker.restore.block_fetcher import FetchStats
from services.decode.handoff import HandoffPull
from services.decode.plan import DecodePlan
from services.decode.speculation import Speculation
from slipstream.enum_names import FINISH_REASONS
from slipstream.errors import Aborted, Internal, SlipstreamError
from slipstream.rpc.rpc_errors import to_failure
from slipstream.v1 import common_pb2, decode_pb2, prefill_pb2

log = logging.getLogger(__name__)

# Sends a delta with the next frame. Those of a step are sent together.
Emit = Callable[[decode_pb2.SequenceDelta], None]


class DecodeSequence(SequenceTask):
    """See `SequenceTask`; its outputs come by `on_output`."""

    def __init__(
        self,
        core: WorkerCore,
        plan: DecodePlan,
        speculation: Speculation | None,
        emit: Emit,
        *,
        handle: int,
    ) -> None:
        """`handle` names the sequence in its deltas."""
        super().__init__(f"decode {plan.key}", request_id=plan.key.request_id)
        self.plan = plan
        self._core = core
        self._speculation = speculation if plan.drafts else None
        self._emit = emit
        self._handle = handle
        self._prompt_hashes = frozenset(
            plan.spec.block_hashes[: len(plan.spec.prompt) // core.info.block_tokens]
        )
        self._pages: Sequence[int] = ()
        self._constraint = core.grammars.begin(plan.spec)
        self._pulled = FetchStats()
        self._restore_ms = 0.0  # of a prompt without a ticket
        self._stats = decode_pb2.SequenceStats()
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_running_sent = False
        self._is_end_sent = False
        self._is_closing_sent = False
        self._reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
        self._releasing: asyncio.Task[None] | None = None
        self._trace: tracing.TraceMetadata = ()  # of the sequence's span

    # ---- OutputHandler

    def on_output(self, output: StepOutput) -> None:
        if self._is_end_sent:
            return
        self._store(output)
        n_shared = output.shared_tokens // self._core.info.block_tokens
        self._note_cached([common_pb2.CACHE_TIER_WORKER] * n_shared)
        self._stats.generated_tokens += len(output.tokens)
        self._stats.decode_steps += bool(output.tokens)
        self._stats.drafted_steps += bool(output.proposed_drafts)
        self._stats.proposed_drafts += output.proposed_drafts
        self._stats.accepted_drafts += output.accepted_drafts
        if output.scores is not None:
            rows = self._delta()
            rows.prompt_logprobs.extend(prompt_logprobs(output.scores))
            self._emit(rows)
        if output.tokens:
            delta = self._delta(tokens=pack_tokens(output.tokens))
            self._set_running(delta)
            delta.is_closing = output.is_closing and not self._is_closing_sent
            self._is_closing_sent = output.is_closing
            delta.logprobs.extend(position_logprobs(p) for p in output.logprobs or ())
            if output.finish is not None:
                self._send_end(finish_reason(output.finish), delta=delta)
            else:
                self._emit(delta)
        elif output.finish is not None:
            self._send_end(finish_reason(output.finish))
        if output.failure is not None:
            self.on_error(output.failure)
        elif output.finish is not None and not self._finished.done():
            self._finished.set_result(None)

    def on_error(self, error: SlipstreamError) -> None:
        if not self._finished.done():
            self._finished.set_exception(error)

    # ---- the task

    async def _run(self) -> None:
        key = self.plan.key
        named: tracing.Attributes = {"request_id": key.request_id, "attempt": key.attempt}
        with tracing.server_span("decode", self.plan.trace, named) as opened:
            self._trace = tracing.trace_metadata()
            try:
                await self._live()
            finally:
                self._note_end(opened)

    async def _live(self) -> None:
        try:
            async with until(self.plan.deadline_s):
                arrived_s = time.perf_counter()
                reservation = await self._core.pages.reserve(self.plan.spec)
                self._core.counters.observe("slipstream_pages_wait_seconds", time.perf_counter() - arrived_s)
                self._pages = reservation.pages
                if self.plan.ticket is None:
                    await self._start_from_prompt(reservation)
                elif not await self._start_from_handoff(self.plan.ticket, reservation):
                    return
                await self._finished
        except asyncio.CancelledError:
            if self._end_error is None:
                self._fail(Aborted(f"{self.plan.key} was aborted"), common_pb2.FINISH_REASON_ABORTED)
            else:
                self._fail(self._end_error, common_pb2.FINISH_REASON_ERROR)
        except SlipstreamError as error:
            self._fail(error, common_pb2.FINISH_REASON_ERROR)
        except Exception:
            log.exception("%s failed", self.plan.key)
            self._fail(Internal("internal error"), common_pb2.FINISH_REASON_ERROR)
        finally:
            self._ending = self._cleaning_up = True  # from here on `end` has nothing to stop
            await self._release()

    async def _release(self) -> None:
        if not self._finished.cancel() and not self._finished.cancelled():
            self._finished.exception()  # retrieved, or asyncio logs an error
        if self._speculation is not None:
            self._speculation.end(self.plan.spec.seq_id)
        self._release_handoff()
        await self._core.release(self.plan.spec.seq_id, self._pages)
        if self._releasing is not None:
            await self._releasing

    def _release_handoff(self) -> None:
        """Once, in the background; also when the pull never began: the exporter need not wait for its
        lease to run out."""
        ticket = self.plan.ticket
        if ticket is None or self._releasing is not None:
            return
        if self._core.peers.addresses.knows_endpoint(ticket.control_endpoint):
            pull = self._open_pull(ticket, first_block=0, draft_rows=0)
            self._releasing = asyncio.create_task(pull.release(), name=f"release {self.plan.key}")

    def _open_pull(
        self, ticket: prefill_pb2.HandoffTicket, *, first_block: int, draft_rows: int
    ) -> HandoffPull:
        return HandoffPull(
            ticket,
            self._core.peers.channel(ticket.control_endpoint),
            self._core.fetcher,
            pages=self._pages[: len(ticket.blocks)],
            first_block=first_block,
            stats=self._pulled,
            deadline_s=self.plan.deadline_s,
            draft_rows=draft_rows,
        )

    async def _start_from_handoff(
        self, ticket: prefill_pb2.HandoffTicket, reservation: PageReservation
    ) -> bool:
        """Pull, commit, run. False when the request ended with its first token."""
        spec, core = self.plan.spec, self._core
        await core.peers.addresses.check_endpoint(ticket.control_endpoint)
        await core.peers.addresses.check_session(ticket.transport_session)
        pull = self._open_pull(
            ticket,
            first_block=reservation.cached_tokens // core.info.block_tokens,
            draft_rows=self._speculation.prompt_rows(spec.context_tokens) if self._speculation else 0,
        )
        complete = await pull.run()
        core.counters.observe(
            "slipstream_handoff_transfer_seconds",
            self._pulled.elapsed_ms / 1e3,
            span=tracing.exported_context(),
        )
        if complete.finish_reason:
            self._send_end(complete.finish_reason)
            return False
        await self._open_drafts(ticket.transport_session, complete)
        core.attach(spec.seq_id, self, computed_tokens=spec.context_tokens, prefilling=False)
        first_token = complete.first_token_id

        constraint = await self._constraint
        if constraint is not None:
            constraint.is_closing |= complete.is_closing
            self._is_closing_sent = constraint.is_closing

        def commit(engine: Engine) -> None:
            engine.fill(spec.seq_id, spec.context_tokens)
            engine.start(spec.seq_id, first_token=first_token, constraint=constraint)

        await core.thread.receive(spec.seq_id, spec.context_tokens)
        await core.thread.call(commit)
        self._release_handoff()
        self._send_running()
        return True

    async def _open_drafts(self, session_id: str, complete: prefill_pb2.HandoffComplete) -> None:
        """The drafter learns the prompt's last positions at once, so that the first step has drafts."""
        if self._speculation is None:
            return
        spec, stated = self.plan.spec, complete.draft_features
        packed: bytes | None = None
        if stated.rows:
            exported = ExportedFeatures(stated.address, stated.checksum)
            n_bytes = stated.rows * stated.width * FEATURE_BYTES
            packed = await self._core.feature_reader.read(session_id, exported, n_bytes)
        rows: ContextRows[Features] | None = None
        if packed is not None:
            features = parse_bfloat16(packed, stated.width, "draft_features")
            context = np.concatenate([spec.prompt, np.array([*spec.emitted, complete.first_token_id], "<u4")])
            first = stated.start_position
            tokens = context[first + 1 : first + 1 + len(features)]
            if len(tokens) == len(features) and stated.width == self._core.info.feature_width:
                rows = ContextRows(spec.seq_id, first, tokens, features)
            else:
                log.warning("%s: draft features do not fit their prompt", self.plan.key)
        self._speculation.open(spec.seq_id, rows)

    async def _start_from_prompt(self, reservation: PageReservation) -> None:
        """Restore the cached prefix and compute the rest here."""
        spec, core = self.plan.spec, self._core
        block_tokens = core.info.block_tokens
        first = reservation.cached_tokens // block_tokens
        began_s = time.perf_counter()
        found = await core.restorer.restore_prefix(
            (self.plan.kvstore_endpoint,),
            spec.restorable_hashes(block_tokens),
            reservation.pages,
            first_block=first,
            stats=self._pulled,
            salt=spec.salt,
            block_ms=core.stats.block_ms(block_tokens),
        )
        self._restore_ms = (time.perf_counter() - began_s) * 1e3
        filled = (first + len(found.tiers)) * block_tokens
        self._note_cached([*([common_pb2.CACHE_TIER_WORKER] * first), *found.tiers])
        if self._speculation is not None:
            self._speculation.open(spec.seq_id)
        core.attach(spec.seq_id, self, computed_tokens=filled, prefilling=True)

        await core.thread.receive(spec.seq_id, filled)
        await core.thread.call(lambda engine: engine.fill(spec.seq_id, filled))
        self._pages = (await core.spare_late_pages(reservation, found)).pages
        constraint = await self._constraint
        await core.thread.call(lambda engine: engine.start(spec.seq_id, constraint=constraint))
        self._send_running()

    def _note_end(self, opened: Span) -> None:
        """Annotate the span with the statistics and the finish reason."""
        if not opened.is_recording():
            return
        stats = self._stats
        tracing.annotate(
            opened,
            prompt_tokens=len(self.plan.spec.prompt),
            emitted_tokens=len(self.plan.spec.emitted),
            cached_tokens=sum(cached.tokens for cached in stats.cached),
            tokens=stats.generated_tokens,
            steps=stats.decode_steps,
            proposed_drafts=stats.proposed_drafts,
            accepted_drafts=stats.accepted_drafts,
            finish=FINISH_REASONS.name(self._reason),
        )

    # ---- deltas

    def _store(self, output: StepOutput) -> None:
        blocks = output.new_full_blocks
        if not self.plan.store_generated:
            blocks = tuple(block for block in blocks if block.hash in self._prompt_hashes)
        self._core.writer.offer(
            self.plan.kvstore_endpoint, blocks, salt=self.plan.spec.salt, trace=self._trace
        )

    def _note_cached(self, tiers: Sequence[common_pb2.CacheTier.ValueType]) -> None:
        add_cached_tokens(self._stats.cached, tiers, self._core.info.block_tokens)

    def _delta(self, *, tokens: bytes = b"") -> decode_pb2.SequenceDelta:
        return decode_pb2.SequenceDelta(handle=self._handle, tokens=tokens)

    def _send_running(self) -> None:
        """Send a delta with `running`, unless a step was faster than the answer to `start` and sent it."""
        if not self._is_running_sent and not self._is_end_sent:
            delta = self._delta()
            self._set_running(delta)
            self._emit(delta)

    def _set_running(self, delta: decode_pb2.SequenceDelta) -> None:
        """Say in the first delta that the sequence runs, and what a prompt without a ticket began with."""
        if self._is_running_sent:
            return
        delta.running = self._is_running_sent = True
        if self.plan.ticket is None:
            delta.prompt_start.cached.extend(self._stats.cached)
            delta.prompt_start.restore_ms = self._restore_ms

    def _send_end(
        self, reason: common_pb2.FinishReason.ValueType, *, delta: decode_pb2.SequenceDelta | None = None
    ) -> None:
        """Send the last delta, once."""
        if self._is_end_sent:
            return
        self._is_end_sent, self._reason = True, reason
        delta = delta if delta is not None else self._delta()
        delta.finish_reason = reason
        self._stats.kv_bytes_pulled = self._pulled.n_bytes
        self._stats.transfer_ms = self._pulled.elapsed_ms
        if self._speculation is not None:
            missed = self._speculation.end(self.plan.spec.seq_id)
            self._stats.draft_waits_missed = missed
            self._core.counters.add("slipstream_draft_waits_missed_total", missed)
        delta.stats.CopyFrom(self._stats)
        self._emit(delta)

    def _fail(self, error: SlipstreamError, reason: common_pb2.FinishReason.ValueType) -> None:
        tracing.failed(error)
        delta = self._delta()
        if reason == common_pb2.FINISH_REASON_ERROR:
            delta.failure.CopyFrom(to_failure(error))
        self._send_end(reason, delta=delta)

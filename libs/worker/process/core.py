"""Shared core of prefill and decode, around an engine: its thread, pages, transport, and where outputs go.

core = WorkerCore(build, transport, instance=instance)
await core.open(fingerprint_of, max_waiting=max_waiting, max_running=max_running)
reservation = await core.pages.reserve(spec)
core.attach(seq_id, handler, ...)       # from now on the sequence's outputs reach the handler
await core.thread.call(lambda engine: engine.start(seq_id))
await core.release(seq_id, reservation.pages)
await core.close()
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from libs.common.checksum import UNKEYED, KvChecksum
from libs.common.cluster.address_book import AddressBook
from libs.common.cluster.fingerprint import Fingerprint
from libs.common.cluster.worker_service import new_incarnation
from libs.common.kv_events.log import BlockEventLog
from libs.common.kv_events.server import KvEventServicer
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.recent_rate import RecentRate
from libs.common.transport.base import KvTransport
from libs.engine.step.types import (
    FEATURE_WINDOW_TOKENS,
    Engine,
    EngineInfo,
    PageChange,
    PageReservation,
    StepOutput,
)
from libs.worker.engine.engine_thread import DraftSource, EngineThread, Step
from libs.worker.engine.feature_memory import FeatureMemory, FeatureReader
from libs.worker.engine.page_exporter import STAGED, PageExporter
from libs.worker.engine.page_memory import PageMemory
from libs.worker.engine.page_queue import PageQueue
from libs.worker.engine.step_stats import StepStats
from libs.worker.offload.block_writer import BlockWriter
from libs.worker.peer_cache.peer_cache_server import PeerCacheServer
from libs.worker.pins.peers import Peers
from libs.worker.requests.messages import FEATURE_BYTES
from libs.worker.requests.prompt_cache import PromptCache
from libs.worker.requests.sequence_grammars import SequenceGrammars
from libs.worker.restore.block_fetcher import BlockFetcher
from libs.worker.restore.prefix_restore import PrefixRestorer, Restored
from libs.worker.restore.restore_budget import FLOOR_MS
from slipstream import errors
from slipstream.rpc.dial import PLAIN_DIAL, Dial
from slipstream.v1 import common_pb2, worker_pb2

log = logging.getLogger(__name__)

_TIER = "worker"  # the tier of these pages, among the tiers of KV


class OutputHandler(Protocol):
    """The owner of a running sequence; called on the event loop, must not block."""

    def on_output(self, output: StepOutput) -> None:
        """A step did something for the sequence."""
        ...

    def on_error(self, error: errors.SlipstreamError) -> None:
        """The sequence cannot go on."""
        ...


class WorkerCore:
    """Owns everything it opens; `close` ends it. See the module's text for the order of use."""

    def __init__(
        self,
        build: Callable[[], Engine],
        transport: KvTransport,
        *,
        instance: str,
        dial: Dial = PLAIN_DIAL,
        addresses: AddressBook | None = None,
        draft_source: DraftSource | None = None,
        wants_features: bool = True,
        on_broken: Callable[[], None] = lambda: None,
        restore_floor_ms: float = FLOOR_MS,
        checksum: KvChecksum = UNKEYED,
        counters: Counters | None = None,
        kv_registration: str = STAGED,
        kv_staging_bytes: int | None = None,
        model_dir: Path | None = None,
    ) -> None:
        """`restore_floor_ms`: how long any prompt may wait for KV. `addresses`: what may be dialled.
        `wants_features`: EngineThread's. `kv_*`: PageExporter's. `model_dir` has the tokenizer for structured
        output."""
        self._restore_floor_ms = restore_floor_ms
        self._checksum = checksum
        self._kv_registration = kv_registration
        self._kv_staging_bytes = kv_staging_bytes
        self._model_dir = model_dir
        self.instance = instance
        self.transport = transport
        self.counters = counters or Counters()
        self.stats = StepStats(self.counters)
        self._busy, self._prefilled, self._generated = RecentRate(), RecentRate(), RecentRate()
        self.peers = Peers(dial=dial, addresses=addresses)
        self.thread = EngineThread(build, self, draft_source=draft_source, wants_features=wants_features)
        # Routers learn from these which blocks this worker's cache holds.
        self.events = KvEventServicer(BlockEventLog(new_incarnation()))
        self.load_changed: Callable[[], None] = lambda: None
        self._on_broken = on_broken
        self._handlers: dict[str, OutputHandler] = {}
        self._is_open = False

    async def open(
        self, fingerprint_of: Callable[[EngineInfo], Fingerprint], *, max_waiting: int, max_running: int
    ) -> None:
        """Load the engine on its thread and prepare its pages for reads by peers."""
        self.info = await self.thread.start()
        self.fingerprint = fingerprint_of(self.info)
        self.memory = await self.thread.call(lambda engine: PageMemory(engine, self._checksum))
        self.exporter = PageExporter(
            self.memory,
            self.transport,
            registration=self._kv_registration,
            staging_bytes=self._kv_staging_bytes,
        )
        self.features = FeatureMemory(
            self.transport,
            slot_bytes=FEATURE_WINDOW_TOKENS * FEATURE_BYTES * self.info.feature_width,
            checksum=self._checksum,
        )
        self.feature_reader = FeatureReader(
            self.transport, self.features, self.peers.addresses, self.counters
        )
        self.grammars = SequenceGrammars(self._model_dir, vocab_size=self.info.vocab_size)
        await self.grammars.warm_up()
        self.prompts = PromptCache(block_tokens=self.info.block_tokens)
        self.pages = PageQueue(self.thread, max_waiting=max_waiting, max_running=max_running)
        self.fetcher = BlockFetcher(self.transport, self.memory, self.thread, self.counters)
        self.restorer = PrefixRestorer(
            self.fetcher,
            self.peers,
            transport_kind=self.transport.kind,
            instance=self.instance,
            fingerprint=self.fingerprint,
            counters=self.counters,
            floor_ms=self._restore_floor_ms,
        )
        self.writer = BlockWriter(
            self.thread,
            self.exporter,
            self.transport,
            self.peers,
            instance=self.instance,
            fingerprint=self.fingerprint,
            max_pinned_blocks=max(1, self.info.n_pages // 2),
        )
        # PeerCacheServer implements the pin calls of KvstoreService only.
        self.lender = PeerCacheServer(  # type: ignore[abstract]
            self.thread, self.exporter, self.transport, self.fingerprint
        )
        self._is_open = True

    def attach(self, seq_id: str, handler: OutputHandler, *, computed_tokens: int, prefilling: bool) -> None:
        """Send the sequence's outputs to `handler`. Call before the engine starts it."""
        self._handlers[seq_id] = handler
        self.stats.open(seq_id, computed_tokens=computed_tokens, prefilling=prefilling)

    async def spare_late_pages(self, reservation: PageReservation, found: Restored) -> PageReservation:
        """Other pages in the place of those that late bytes of a restore may reach; without any to be had it
        waits until none can land."""
        if found.late is None:
            return reservation
        seq_id, pages = reservation.seq_id, list(found.late_pages)
        try:
            return await self.thread.call(lambda engine: engine.exchange(seq_id, pages))
        except errors.OutOfPages:
            await asyncio.shield(found.late)
            return reservation

    async def release(self, seq_id: str, pages: Sequence[int]) -> None:
        """End the sequence and give its pages back; late bytes and stores in progress keep theirs.

        `pages`: those it was reserved with. Idempotent; must not be abandoned half-way (shield it).
        """
        self._handlers.pop(seq_id, None)
        self.stats.close(seq_id)
        try:
            await self.fetcher.pin_late_pages(pages)
        finally:
            await self.pages.release(seq_id)
            self.load_changed()

    async def close(self) -> None:
        """Stop lending, storing, the engine and the transport, in this order. Also after a failed `open`."""
        if self._is_open:
            await self.lender.close()
            await self.writer.close()
            await self.restorer.close()
            self.grammars.close()
        await self.thread.stop()
        await self.transport.close()
        await self.peers.close()

    def ledger(self) -> worker_pb2.Ledger:
        """The worker's holdings; the service adds its own."""
        held = self.thread.ledger
        pins = self.writer.pinned_blocks + self.fetcher.quarantined_pages + self.lender.leased_blocks
        owned = self.pages.running or self.pages.waiting or pins
        return worker_pb2.Ledger(
            sequences=max(held.sequences, self.pages.running + self.pages.waiting),
            # The engine reports pages that are pinned to be stored a moment later.
            blocks_held=max(held.pages_held, self.writer.pinned_blocks),
            pins=self.restorer.pins + self.lender.leases,
            reservations=self.writer.reservations,
            transfers=self.transport.reads_in_flight,
            # A launched step keeps the pages of sequences that left meanwhile, until it has run.
            blocks_leaked=0 if owned else held.pages_held - held.launched_pages,
        )

    def measure(self) -> dict[str, float]:
        """Gauges by metric name, few before `open` is done. Those with labels are set in `counters`."""
        if not self._is_open:
            return {
                "slipstream_kv_quarantined_bytes": self.transport.quarantined_bytes,
                "slipstream_kv_quarantined_pages": 0,
            }
        held, info = self.thread.ledger, self.info
        pages = {"free": held.pages_free, "cached": held.pages_cached, "held": held.pages_held}
        self.counters.replace("slipstream_kv_blocks", {(state,): n for state, n in pages.items()})
        self.counters.set("slipstream_kv_occupancy_ratio", held.pages_held / info.n_pages, (_TIER,))
        self.counters.set("slipstream_kv_cache_info", 1, (str(info.block_tokens), str(info.n_pages)))
        return {
            "slipstream_requests_running": self.pages.running,
            "slipstream_requests_waiting": self.pages.waiting,
            "slipstream_kv_blocks_leaked": self.ledger().blocks_leaked,
            "slipstream_kv_quarantined_bytes": self.transport.quarantined_bytes,
            "slipstream_kv_quarantined_pages": self.fetcher.quarantined_pages,
            "slipstream_steps_aborted_total": held.steps_aborted,
            "slipstream_kv_staged_bytes": self.exporter.staged_bytes + self.features.held_bytes,
            "slipstream_prompts_by_reference_total": self.prompts.hits,
            "slipstream_prompt_prefixes_unknown_total": self.prompts.misses,
            "slipstream_prompt_memory_bytes": self.prompts.n_bytes,
        }

    def load(self) -> worker_pb2.LoadReport:
        """Load as the router sees it."""
        held, stats, now_s = self.thread.ledger, self.stats, time.monotonic()
        return worker_pb2.LoadReport(
            requests_running=self.pages.running,
            requests_waiting=self.pages.waiting,
            prefill_tokens_in_flight=held.prefill_tokens_waiting,
            decode_tokens_in_flight=held.decode_context_tokens,
            blocks_free=held.pages_free,
            blocks_cached=held.pages_cached,
            blocks_held=held.pages_held,
            prefill_tokens_per_s=stats.prefill_tokens_per_s,
            decode_step_ms=stats.decode_step_ms,
            busy_share=min(self._busy.per_s(now_s, stats.busy_ms / 1e3), 1.0),
            prompt_tokens_per_s=self._prefilled.per_s(now_s, stats.prefilled_tokens),
            generated_tokens_per_s=self._generated.per_s(now_s, stats.generated_tokens),
        )

    # ---- EngineListener

    def on_step(self, step: Step) -> None:
        self.stats.record(step.outputs, step.step_ms, draft_wait_ms=step.draft_wait_ms)
        for output in step.outputs:
            handler = self._handlers.get(output.seq_id)
            if handler is not None:
                handler.on_output(output)
        self.load_changed()

    def on_step_error(self, error: Exception) -> None:
        self._fail_all(
            error if isinstance(error, errors.SlipstreamError) else errors.Internal("a step failed")
        )
        self.thread.resume()

    def on_blocks(self, changes: Sequence[PageChange]) -> None:
        for stored, run in itertools.groupby(changes, key=lambda change: change.stored):
            report = self.events.stored if stored else self.events.removed
            report(common_pb2.CACHE_TIER_WORKER, [change.hash for change in run])

    def on_broken(self, error: BaseException) -> None:
        self._fail_all(errors.Unavailable("the engine is broken"))
        self._on_broken()

    def _fail_all(self, error: errors.SlipstreamError) -> None:
        """Every started sequence ends; its engine side at once, so that the next step is without it."""
        for seq_id, handler in list(self._handlers.items()):
            self._handlers.pop(seq_id)
            self.thread.submit(lambda engine, seq_id=seq_id: engine.release(seq_id))  # type: ignore[misc]
            handler.on_error(error)

"""Restores the leading blocks of a prompt from peers and kvstores into its pages, before computing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from libs.common.cluster.fingerprint import Fingerprint
from libs.common.telemetry import tracing
from libs.common.telemetry.counters import Counters
from libs.worker.pins.peers import Peers
from libs.worker.pins.pin_lease import PinLease, ReaderPins
from libs.worker.requests.tenant_tag import tenant_tag
from libs.worker.requests.time_limit import wait_within
from libs.worker.restore.block_fetcher import BlockFetcher, FetchStats, RemoteBlock
from libs.worker.restore.restore_budget import FLOOR_MS, RestoreBudget
from libs.worker.restore.source_probes import SourceProbes
from slipstream.block_hashes import pack_hashes
from slipstream.enum_names import TRANSPORTS, tier_names
from slipstream.errors import SlipstreamError, TransferError
from slipstream.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc

log = logging.getLogger(__name__)

_LOOKUP_TIMEOUT_S = 2.0
# The reader renews a lease while it reads. A lease whose response is lost pins the source's memory this long.
LEASE_MS = 15_000
# How long to wait for a cancelled read, which usually ends at once.
_CANCEL_WAIT_S = 0.01


@dataclass(slots=True)
class Restored:
    """The tiers of the restored blocks.

    A cancelled read may still write to `late_pages` until `late` is done; do not reuse them before.
    """

    tiers: list[common_pb2.CacheTier.ValueType] = field(default_factory=list)
    late_pages: Sequence[int] = ()
    late: asyncio.Future[None] | None = None


class PrefixRestorer:
    """Pins blocks at a source, reads and verifies them, and releases the pin.

    A dead, slow or corrupt source is a cache miss, never an error. restore_budget.py bounds the restore by
    the time that computing takes; source_breaker.py skips a failed source until it answers probes.
    """

    def __init__(
        self,
        fetcher: BlockFetcher,
        peers: Peers,
        *,
        transport_kind: str,
        instance: str,
        fingerprint: Fingerprint,
        counters: Counters | None = None,
        lease_ms: int = LEASE_MS,
        floor_ms: float = FLOOR_MS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fetcher = fetcher
        self._peers = peers
        self._transport_kind = transport_kind
        self._instance = instance
        self._fingerprint = fingerprint
        self._counters = counters or Counters()
        self._lease_ms = lease_ms
        self._floor_ms = floor_ms
        self._clock = clock
        self._pins = ReaderPins(peers)
        self._background: set[asyncio.Task[None]] = set()
        self.sources = SourceProbes(peers, clock=clock)

    @property
    def pins(self) -> int:
        """The number of pins that are not released."""
        return self._pins.held

    async def restore_prefix(
        self,
        endpoints: Sequence[str],
        hashes: Sequence[bytes],
        pages: Sequence[int],
        *,
        first_block: int,
        stats: FetchStats,
        salt: bytes = b"",
        block_ms: float = 0.0,
    ) -> Restored:
        """Restore from several sources in turn, within one budget. See `restore`.

        `block_ms`: the time to compute one block, 0 when unknown. Empty endpoints are skipped.
        """
        budget = RestoreBudget(
            n_blocks=len(hashes) - first_block,
            block_ms=block_ms,
            clock_ms=lambda: self._clock() * 1e3,
            floor_ms=self._floor_ms,
        )
        found = Restored()
        asked = [endpoint for endpoint in endpoints if endpoint]
        for number, endpoint in enumerate(asked):
            n_after = sum(later not in self.sources.breaker for later in asked[number + 1 :])
            if found.late is not None or not budget.next_source(n_after=n_after):
                break
            got = await self.restore(
                endpoint,
                hashes,
                pages,
                first_block=first_block + len(found.tiers),
                stats=stats,
                salt=salt,
                budget=budget,
            )
            found = Restored([*found.tiers, *got.tiers], got.late_pages, got.late)
        if asked:
            self._counters.observe("slipstream_kv_restore_seconds", budget.spent_ms / 1e3)
            self._counters.add("slipstream_kv_restore_lost_seconds_total", max(0.0, budget.cost_ms) / 1e3)
            self._counters.add("slipstream_kv_restore_bound_seconds_total", budget.bound_ms / 1e3)
        return found

    async def restore(
        self,
        endpoint: str,
        hashes: Sequence[bytes],
        pages: Sequence[int],
        *,
        first_block: int,
        stats: FetchStats,
        salt: bytes = b"",
        budget: RestoreBudget | None = None,
    ) -> Restored:
        """Fill pages[first_block : first_block + n] with verified blocks; the result has n tiers.

        `hashes`: the chain from block 0 to the last wanted block. `endpoint` may be empty. Without a budget
        only the time-outs of the calls apply.
        """
        if not endpoint or first_block >= len(hashes):
            return Restored()
        if not self._peers.addresses.knows_endpoint(endpoint):
            log.warning("%r is no announced worker: the blocks are computed", endpoint[:128])
            return Restored()
        is_trial = endpoint in self.sources.breaker
        if not self.sources.may_ask(endpoint):
            self._counters.add("slipstream_kv_restores_skipped_total")
            return Restored()
        self._counters.add("slipstream_kv_restores_total")
        before_bytes = stats.n_bytes
        wanted = pages[first_block : len(hashes)]
        with tracing.span("restore", source=endpoint, wanted_blocks=len(hashes) - first_block) as opened:
            pin = self._pins.begin(endpoint, self._pin_request(hashes, first_block, salt, budget))
            try:
                if (pinned := await self._answer(endpoint, pin, budget)) is None:
                    return Restored()
                with pin.renewed():
                    found = await self._read(endpoint, pinned, wanted, stats, budget)
            finally:
                if is_trial:
                    self.sources.breaker.end_trial(endpoint)
                pin.release()
            if opened.is_recording():
                n_bytes, tiers = stats.n_bytes - before_bytes, tier_names(found.tiers)
                tracing.annotate(opened, blocks=len(found.tiers), bytes=n_bytes, tiers=tiers)
            return found

    def prefetch(self, endpoint: str, hashes: Sequence[bytes]) -> None:
        """Ask the kvstore to load the chain's blocks from its disks into memory, in the background."""
        if not endpoint or not hashes or endpoint in self.sources.breaker:
            return
        if not self._peers.addresses.knows_endpoint(endpoint):
            return
        stub = kvstore_pb2_grpc.KvstoreServiceStub(self._peers.channel(endpoint))
        request = kvstore_pb2.LookupRequest(
            fingerprint=self._fingerprint.to_proto(), block_hashes=pack_hashes(hashes)
        )
        lookup = asyncio.create_task(_look_up(stub, request))
        self._background.add(lookup)
        lookup.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """End probes and the pin streams to sources."""
        await self.sources.close()
        await self._pins.close()

    def _pin_request(
        self, hashes: Sequence[bytes], first_block: int, salt: bytes, budget: RestoreBudget | None
    ) -> kvstore_pb2.PinRequest:
        request = kvstore_pb2.PinRequest(
            fingerprint=self._fingerprint.to_proto(),
            block_hashes=pack_hashes(hashes),
            first_block=first_block,
            max_blocks=len(hashes) - first_block,
            lease_ms=self._lease_ms,
            owner=self._instance,
            tenant=tenant_tag(salt),
            disk_wait_ms=budget.disk_wait_ms if budget is not None else 0,
            name=secrets.token_hex(16),
        )
        if trace := tracing.trace_metadata():
            request.trace.update(trace)
        return request

    async def _answer(
        self, endpoint: str, pin: PinLease, budget: RestoreBudget | None
    ) -> kvstore_pb2.PinResponse | None:
        """The source's answer; None when it fails or exceeds the budget."""
        if not await self._in_time(pin.answer, budget):
            log.warning("%s does not answer in time: the blocks are computed", endpoint)
            tracing.annotate(given_up=True)
            self.sources.record_timeout(endpoint)
            return None
        try:
            return pin.answer.result()
        except SlipstreamError as error:
            log.warning("%s does not answer: %s", endpoint, error)
            tracing.failed(error)
            self.sources.record_failure(endpoint)
            return None

    async def _in_time(self, work: asyncio.Future[Any], budget: RestoreBudget | None) -> bool:
        """Whether `work` ends within the budget. Does not cancel it."""
        if budget is None:
            await asyncio.wait({work})
        elif not await wait_within(work, lambda: budget.left_ms):
            self._counters.add("slipstream_kv_restores_given_up_total")
            return False
        return True

    async def _read(
        self,
        endpoint: str,
        pinned: kvstore_pb2.PinResponse,
        pages: Sequence[int],
        stats: FetchStats,
        budget: RestoreBudget | None,
    ) -> Restored:
        """Pull the pinned blocks in order. Keeps the leading verified blocks even after a failure."""
        blocks = self._usable(endpoint, pinned, len(pages))
        if not blocks:
            self.sources.breaker.record_success(endpoint)
            return Restored()
        remote = [
            RemoteBlock(page, block.address, block.checksum)
            for page, block in zip(pages, blocks, strict=False)
        ]
        n_verified = 0

        def on_verified(n_blocks: int) -> None:
            nonlocal n_verified
            n_verified += n_blocks
            if budget is not None:
                budget.add_restored(n_blocks)

        pull = asyncio.ensure_future(
            self._fetcher.pull(pinned.transport_session, remote, stats, on_verified=on_verified)
        )
        try:
            in_time = await self._in_time(pull, budget)
            if not in_time:
                pull.add_done_callback(_retrieve_error)
                pull.cancel()
                await asyncio.wait({pull}, timeout=_CANCEL_WAIT_S)
        except asyncio.CancelledError:
            # The pages may be released only after all pending writes to them have ended.
            await _cancel_and_wait(pull)
            raise
        # The caller exchanges the late pages, the only ones where late bytes can land.
        found = Restored([block.tier for block in blocks[:n_verified]])
        found.late_pages = self._fetcher.late_pages(pull, pages[: len(blocks)], n_verified)
        if found.late_pages:
            found.late = await self._fetcher.abandon(pull, found.late_pages)
        self._report(endpoint, pull, in_time=in_time, has_blocks=bool(found.tiers))
        return found

    def _report(self, endpoint: str, pull: asyncio.Future[None], *, in_time: bool, has_blocks: bool) -> None:
        """Report the outcome of a read to the circuit breaker of its source."""
        if not in_time:
            log.warning("%s delivers blocks too slowly: the others are computed", endpoint)
            tracing.annotate(given_up=True)
            if has_blocks:
                self.sources.record_timeout(endpoint)
            else:
                self.sources.record_failure(endpoint)
            return
        error = pull.exception()
        if error is None:
            self.sources.breaker.record_success(endpoint)
            return
        if not isinstance(error, SlipstreamError):
            raise error
        log.warning("blocks of %s are not used: %s", endpoint, error)
        tracing.failed(error)
        if isinstance(error, TransferError):
            self.sources.record_failure(endpoint)

    def _usable(
        self, endpoint: str, pinned: kvstore_pb2.PinResponse, n_wanted: int
    ) -> Sequence[kvstore_pb2.PinnedBlock]:
        """The leading pinned blocks whose transport and size fit this worker."""
        blocks = pinned.blocks[:n_wanted]
        if blocks and pinned.transport != TRANSPORTS.value(self._transport_kind):
            name = TRANSPORTS.name(pinned.transport)
            log.warning("%s uses transport %s, this worker %s", endpoint, name, self._transport_kind)
            return []
        if blocks and not self._peers.addresses.knows_session(pinned.transport_session):
            log.warning("%s names a transport session that no worker announced", endpoint)
            return []
        for number, block in enumerate(blocks):
            if block.n_bytes != self._fetcher.page_bytes:
                wrong = (endpoint, block.n_bytes, self._fetcher.page_bytes)
                log.warning("%s has a block of %d bytes, not %d", *wrong)
                return blocks[:number]
        return blocks


async def _cancel_and_wait(pull: asyncio.Future[None]) -> None:
    """Cancel the read and wait for its end, even if this wait is cancelled."""
    pull.cancel()
    while not pull.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({pull})


def _retrieve_error(pull: asyncio.Future[None]) -> None:
    if not pull.cancelled():
        pull.exception()  # so that asyncio does not log it


async def _look_up(
    stub: kvstore_pb2_grpc.KvstoreServiceAsyncStub, request: kvstore_pb2.LookupRequest
) -> None:
    try:
        await stub.Lookup(request, timeout=_LOOKUP_TIMEOUT_S, metadata=tracing.trace_metadata())
    except grpc.aio.AioRpcError as error:
        log.info("nothing is prefetched: %s", error.code())

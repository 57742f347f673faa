"""Leading blocks of a prompt from peers and the kvstore into reserved pages, before anything is computed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from libs.common.block_hash import pack_hashes
from libs.common.errors import SlipstreamError, TransferError
from libs.common.fingerprint import Fingerprint
from libs.common.rpc_errors import from_rpc_error
from libs.common.telemetry import Counters
from libs.worker.peers import Peers
from libs.worker.pin_releases import PinReleases, arrived
from libs.worker.pull import BlockPuller, PullStats, RemoteBlock
from libs.worker.restore_budget import FLOOR_MS, RestoreBudget
from libs.worker.source_probes import SourceProbes
from libs.worker.tenant_tag import tenant_tag
from libs.worker.time_limit import wait_within
from slipstream.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc

log = logging.getLogger(__name__)

PIN_TIMEOUT_S = 2.0
# Renewed while reading; a grant whose answer is lost holds memory of the store for this long.
LEASE_MS = 15_000
_RENEWALS_A_LEASE = 3
_RELEASE_TIMEOUT_S = 2.0
_ANSWER_LOST = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
# A read that was told to stop mostly ends at once.
_QUIET_S = 0.01


@dataclass(slots=True)
class Restored:
    """The tiers of the blocks that came. `late_pages`: those that a read which was given up may still write
    to, until `late` has ended; nobody else may."""

    tiers: list[common_pb2.CacheTier.ValueType] = field(default_factory=list)
    late_pages: Sequence[int] = ()
    late: asyncio.Future[None] | None = None


class PrefixRestorer:
    """Pins, reads, verifies, releases. A source that is gone, slow or wrong is a miss, never an error: the
    time that it may take is bounded by what computing takes (`restore_budget.py`), and one that failed is
    left alone until it answers probes (`source_health.py`)."""

    def __init__(
        self,
        puller: BlockPuller,
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
        self._puller = puller
        self._peers = peers
        self._transport_kind = transport_kind
        self._instance = instance
        self._fingerprint = fingerprint
        self._counters = counters or Counters()
        self._lease_ms = lease_ms
        self._floor_ms = floor_ms
        self._clock = clock
        self._background: set[asyncio.Task[None]] = set()
        self._releases = PinReleases()
        self.sources = SourceProbes(peers, clock=clock)
        self.pins = 0

    async def restore_prefix(
        self,
        endpoints: Sequence[str],
        hashes: Sequence[bytes],
        pages: Sequence[int],
        *,
        first_block: int,
        stats: PullStats,
        salt: bytes = b"",
        block_ms: float = 0.0,
    ) -> Restored:
        """As `restore`, from these sources in turn, all within one bound. `block_ms`: what computing one
        block takes, 0 when that is not known. Endpoints may be empty."""
        budget = RestoreBudget(
            n_blocks=len(hashes) - first_block,
            block_ms=block_ms,
            clock_ms=lambda: self._clock() * 1e3,
            floor_ms=self._floor_ms,
        )
        found = Restored()
        asked = [endpoint for endpoint in endpoints if endpoint]
        for number, endpoint in enumerate(asked):
            n_after = sum(later not in self.sources.health for later in asked[number + 1 :])
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
        self._counters.add("slipstream_kv_restore_ms_total", budget.spent_ms)
        self._counters.add("slipstream_kv_restore_lost_ms_total", max(0.0, budget.cost_ms))
        self._counters.add("slipstream_kv_restore_bound_ms_total", budget.bound_ms if asked else 0.0)
        return found

    async def restore(
        self,
        endpoint: str,
        hashes: Sequence[bytes],
        pages: Sequence[int],
        *,
        first_block: int,
        stats: PullStats,
        salt: bytes = b"",
        budget: RestoreBudget | None = None,
    ) -> Restored:
        """Fill pages[first_block : first_block + n] with verified blocks; n are the tiers that it gives.

        `hashes`: the chain from block 0 on, no longer than what is wanted. `endpoint` may be empty. Without a
        budget only calls that hang are bounded.
        """
        if not endpoint or first_block >= len(hashes):
            return Restored()
        if not self.sources.may_ask(endpoint):
            self._counters.add("slipstream_kv_restores_skipped_total")
            return Restored()
        self._counters.add("slipstream_kv_restores_total")
        stub = kvstore_pb2_grpc.KvstoreServiceStub(self._peers.channel(endpoint))
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
        riders = self._releases.board(endpoint, request)
        pinning = stub.Pin(request, timeout=PIN_TIMEOUT_S)
        answer = asyncio.ensure_future(_answer(pinning))
        answer.add_done_callback(functools.partial(arrived, riders))
        self.pins += 1
        lease_id = ""
        try:
            if not await self._in_time(answer, budget):
                log.warning("%s does not answer in time: the blocks are computed", endpoint)
                self.sources.unanswered(endpoint)
                return Restored()
            pinned = answer.result()
            lease_id = pinned.lease_id
            keeping = asyncio.create_task(_keep_pinned(stub, pinned))
            try:
                return await self._read(endpoint, pinned, pages[first_block : len(hashes)], stats, budget)
            finally:
                keeping.cancel()
        except grpc.aio.AioRpcError as error:
            log.warning("%s does not answer: %s", endpoint, from_rpc_error(error))
            self.sources.failed(endpoint)
            return Restored()
        finally:
            # A cancel here ends the call, and the store then keeps nothing of it.
            answer.cancel()
            self.sources.health.untold(endpoint)
            # In the background, also after a cancel: nobody waits for it, and the lease ends it anyway.
            if lease_id:
                offered = self._releases.offer(endpoint, lease_id)
                self._keep(self._release_some_time(endpoint, stub, lease_id, offered))
            else:
                self._keep(self._release(stub, pinning, request.name))

    def prefetch(self, endpoint: str, hashes: Sequence[bytes]) -> None:
        """Have the kvstore bring what its disks hold of the chain into memory; nobody waits for it."""
        if not endpoint or not hashes or endpoint in self.sources.health:
            return
        stub = kvstore_pb2_grpc.KvstoreServiceStub(self._peers.channel(endpoint))
        request = kvstore_pb2.LookupRequest(
            fingerprint=self._fingerprint.to_proto(), block_hashes=pack_hashes(hashes)
        )
        self._keep(_ask(stub, request))

    async def close(self) -> None:
        """End what runs behind restores."""
        await self.sources.close()

    def _keep(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _in_time(self, work: asyncio.Future[Any], budget: RestoreBudget | None) -> bool:
        """Whether `work` has ended before the budget was spent; it is not cancelled."""
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
        stats: PullStats,
        budget: RestoreBudget | None,
    ) -> Restored:
        """Pull the pinned blocks, the leading ones first, and keep those that came whatever happens."""
        blocks = self._usable(endpoint, pinned, len(pages))
        if not blocks:
            self.sources.health.worked(endpoint)
            return Restored()
        remote = [
            RemoteBlock(page, block.address, block.checksum)
            for page, block in zip(pages, blocks, strict=False)
        ]
        n_came = 0

        def came(n_blocks: int) -> None:
            nonlocal n_came
            n_came += n_blocks
            if budget is not None:
                budget.came(n_blocks)

        pull = asyncio.ensure_future(self._puller.pull(pinned.transport_session, remote, stats, came=came))
        try:
            in_time = await self._in_time(pull, budget)
            if not in_time:
                pull.add_done_callback(_forget)
                pull.cancel()
                await asyncio.wait({pull}, timeout=_QUIET_S)
        except asyncio.CancelledError:
            # Who takes the pages back takes them when no byte lands there any more.
            await _ended(pull)
            raise
        # What comes from here on comes into pages that are exchanged.
        found = Restored([block.tier for block in blocks[:n_came]])
        found.late_pages = self._puller.late_pages(pull, pages[: len(blocks)], n_came)
        if found.late_pages:
            found.late = await self._puller.abandon(pull, found.late_pages)
        self._judge(endpoint, pull, in_time=in_time, moved=bool(found.tiers))
        return found

    def _judge(self, endpoint: str, pull: asyncio.Future[None], *, in_time: bool, moved: bool) -> None:
        """What the read tells of its source."""
        if not in_time:
            log.warning("%s gives blocks too slowly: the rest is computed", endpoint)
            if moved:
                self.sources.unanswered(endpoint)
            else:
                self.sources.failed(endpoint)
            return
        error = pull.exception()
        if error is None:
            self.sources.health.worked(endpoint)
            return
        if not isinstance(error, SlipstreamError):
            raise error
        log.warning("blocks of %s are not used: %s", endpoint, error)
        if isinstance(error, TransferError):
            self.sources.failed(endpoint)

    def _usable(
        self, endpoint: str, pinned: kvstore_pb2.PinResponse, n_wanted: int
    ) -> Sequence[kvstore_pb2.PinnedBlock]:
        """The leading blocks that can be read into pages of this worker."""
        blocks = pinned.blocks[:n_wanted]
        if blocks and pinned.transport != self._transport_kind:
            log.warning("%s speaks %s, this worker %s", endpoint, pinned.transport, self._transport_kind)
            return []
        for number, block in enumerate(blocks):
            if block.n_bytes != self._puller.page_bytes:
                wrong = (endpoint, block.n_bytes, self._puller.page_bytes)
                log.warning("%s holds a block of %d bytes, not %d", *wrong)
                return blocks[:number]
        return blocks

    async def _release_some_time(
        self,
        endpoint: str,
        stub: kvstore_pb2_grpc.KvstoreServiceAsyncStub,
        lease_id: str,
        offered: asyncio.Future[bool],
    ) -> None:
        try:
            if not await self._releases.rode(endpoint, lease_id, offered):
                await _end_pin(stub, lease_id)
        finally:
            self.pins -= 1

    async def _release(
        self,
        stub: kvstore_pb2_grpc.KvstoreServiceAsyncStub,
        pinning: grpc.aio.UnaryUnaryCall[kvstore_pb2.PinRequest, kvstore_pb2.PinResponse],
        name: str,
    ) -> None:
        """Of a pin whose answer was not seen."""
        try:
            lease_id = await _lease_of(pinning, name)
            if lease_id:
                await _end_pin(stub, lease_id)
        finally:
            self.pins -= 1


async def _end_pin(stub: kvstore_pb2_grpc.KvstoreServiceAsyncStub, lease_id: str) -> None:
    try:
        request = kvstore_pb2.ReleasePinRequest(lease_id=lease_id)
        await stub.ReleasePin(request, timeout=_RELEASE_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        log.info("a pin is left to its lease: %s", error.code())


async def _lease_of(
    pinning: grpc.aio.UnaryUnaryCall[kvstore_pb2.PinRequest, kvstore_pb2.PinResponse], name: str
) -> str:
    """What to release. Where the answer was not waited for, or got lost, the pin may be there."""
    if pinning.cancelled() or not pinning.done():
        return name
    try:
        return str((await pinning).lease_id)
    except grpc.aio.AioRpcError as error:
        return name if error.code() in _ANSWER_LOST else ""


async def _answer(
    call: grpc.aio.UnaryUnaryCall[kvstore_pb2.PinRequest, kvstore_pb2.PinResponse],
) -> kvstore_pb2.PinResponse:
    """A cancel ends the call, and the store then keeps nothing of it."""
    return await call


async def _ended(pull: asyncio.Future[None]) -> None:
    """Stop the read and wait for its end, through any number of cancels."""
    pull.cancel()
    while not pull.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({pull})


def _forget(pull: asyncio.Future[None]) -> None:
    if not pull.cancelled():
        pull.exception()  # nobody waits for it any more


async def _ask(stub: kvstore_pb2_grpc.KvstoreServiceAsyncStub, request: kvstore_pb2.LookupRequest) -> None:
    try:
        await stub.Lookup(request, timeout=PIN_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        log.info("nothing is prefetched: %s", error.code())


async def _keep_pinned(
    stub: kvstore_pb2_grpc.KvstoreServiceAsyncStub, pinned: kvstore_pb2.PinResponse
) -> None:
    """Renew the pin until cancelled. When it has ended all the same, its blocks may be others' by now:
    then their checksums tell, and the read ends where they do not match."""
    if not pinned.lease_id:
        return
    interval_s = pinned.lease_ms / 1000 / _RENEWALS_A_LEASE
    request = kvstore_pb2.RenewPinRequest(lease_id=pinned.lease_id, lease_ms=pinned.lease_ms)
    while True:
        await asyncio.sleep(interval_s)
        try:
            await stub.RenewPin(request, timeout=interval_s)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                log.warning("a pin ended while its blocks were being read")
                return

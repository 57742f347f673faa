"""KvstoreService over gRPC: validates requests, calls the store, builds responses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from libs.common.checksum import CHECKSUM_BYTES
from libs.common.cluster.address_book import AddressBook, LoopbackAddresses
from libs.common.cluster.worker_service import WorkerService
from libs.common.rpc.pins.names import MAX_RELEASED, PinNames
from libs.common.rpc.pins.server import PinServer
from libs.common.rpc.pins.span import traced_pin
from libs.common.telemetry import tracing
from libs.common.telemetry.counters import Counters
from libs.common.transport.base import KvTransport
from services.kvstore.core.puts import Puts, PutSource
from services.kvstore.core.store import DISK_DEADLINE_S, BlockStore, PinnedBlock
from services.kvstore.operations import Operations
from slipstream.block_hashes import HASH_BYTES, pack_hashes, unpack_hashes
from slipstream.enum_names import KVSTORE_TIERS, TRANSPORTS
from slipstream.errors import FailedPrecondition, InvalidArgument, Overloaded
from slipstream.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc

# A chain of 65,536 blocks of 64 tokens is a context of four million tokens.
MAX_CHAIN_BLOCKS = 65_536
MAX_PINS = 4096
MAX_COMMIT_S = 30.0
MAX_TENANT_TAG_BYTES = 16
# The answer to a pin or commit must leave before the caller's deadline.
ANSWER_MARGIN_S = 0.2

Context = grpc.aio.ServicerContext[Any, Any]


class KvstoreServicer(kvstore_pb2_grpc.KvstoreServiceServicer):
    """The servicer of one node."""

    def __init__(
        self,
        store: BlockStore,
        puts: Puts,
        transport: KvTransport,
        worker: WorkerService,
        *,
        addresses: AddressBook | None = None,
        counters: Counters | None = None,
    ) -> None:
        """`worker` refuses while it drains, and reports the load. `addresses`: from which transport sessions
        this pulls."""
        self._store = store
        self._puts = puts
        self._transport = transport
        self._operations = Operations(store)
        self._counters = counters or Counters()
        self._names = PinNames()
        self.pin_streams = PinServer(self, self._end_pin)
        self._worker = worker
        self._addresses: AddressBook = addresses or LoopbackAddresses()

    async def Lookup(
        self, request: kvstore_pb2.LookupRequest, context: Context
    ) -> kvstore_pb2.LookupResponse:
        chain = _chain(request.fingerprint, request.block_hashes)
        tiers = await self._store.lookup(chain)
        tracing.annotate(wanted_blocks=len(chain), blocks=len(tiers))
        self._store.prefetch(chain)
        return kvstore_pb2.LookupResponse(held_blocks=len(tiers), tiers=bytes(tiers))

    async def pin(self, request: kvstore_pb2.PinRequest, context: Context) -> kvstore_pb2.PinResponse:
        ended = request.released[:MAX_RELEASED]
        for lease_id in ended:
            self._store.release_pin(self._names.end(lease_id))
        response = await traced_pin(request, self._pin(request, context))
        response.ended_pins = len(ended)
        return response

    async def _pin(self, request: kvstore_pb2.PinRequest, context: Context) -> kvstore_pb2.PinResponse:
        self._worker.refuse_when_draining()
        chain = _chain(request.fingerprint, request.block_hashes)
        if self._store.pins >= MAX_PINS:
            raise Overloaded(f"{MAX_PINS} pins are held already")
        tenant = _tenant(request.tenant)
        if not self._names.begin(request.name):
            return kvstore_pb2.PinResponse()
        end = request.first_block + request.max_blocks if request.max_blocks else len(chain)
        started, lease_id = time.perf_counter(), ""
        try:
            pin = await self._store.pin(
                chain[:end],
                first_block=request.first_block,
                tenant=tenant,
                owner=request.owner,
                requested_ms=request.lease_ms,
                disk_wait_s=_time_for(context, at_most_s=_disk_wait_s(request)),
            )
            lease_id = pin.lease.lease_id if pin.lease is not None else ""
        finally:
            wanted = self._names.done(request.name, lease_id)
            if not wanted:
                self._store.release_pin(lease_id)
            self._worker.load_changed()
        if pin.lease is None or not wanted:
            return kvstore_pb2.PinResponse()
        self._count_pin(pin.blocks, elapsed_s=time.perf_counter() - started)
        self._release_if_cancelled(pin.lease.lease_id)
        return self._pinned(pin.blocks, pin.lease.lease_id, pin.lease.lease_ms)

    def _pinned(self, blocks: Sequence[PinnedBlock], lease_id: str, lease_ms: int) -> kvstore_pb2.PinResponse:
        return kvstore_pb2.PinResponse(
            lease_id=lease_id,
            transport=TRANSPORTS.value(self._transport.kind),
            transport_session=self._transport.session_id,
            blocks=[
                kvstore_pb2.PinnedBlock(
                    address=self._store.dram.address_of(pinned.block.slot),
                    n_bytes=pinned.block.n_bytes,
                    checksum=pinned.block.value,
                    tier=pinned.tier,
                )
                for pinned in blocks
            ],
            lease_ms=lease_ms,
        )

    async def renew_pin(
        self, request: kvstore_pb2.RenewPinRequest, context: Context
    ) -> kvstore_pb2.RenewPinResponse:
        self._store.renew_pin(request.lease_id, requested_ms=request.lease_ms)
        return kvstore_pb2.RenewPinResponse()

    async def release_pin(
        self, request: kvstore_pb2.ReleasePinRequest, context: Context
    ) -> kvstore_pb2.ReleasePinResponse:
        self._end_pin(request.lease_id)
        return kvstore_pb2.ReleasePinResponse()

    async def Pins(
        self, request_iterator: AsyncIterator[kvstore_pb2.PinsRequest], context: Context
    ) -> AsyncIterator[kvstore_pb2.PinsResponse]:
        async with aclosing(self.pin_streams.serve(request_iterator)) as frames:
            async for frame in frames:
                yield frame

    async def Reserve(
        self, request: kvstore_pb2.ReserveRequest, context: Context
    ) -> kvstore_pb2.ReserveResponse:
        self._worker.refuse_when_draining()
        keys = _chain(request.fingerprint, request.block_hashes)
        lease = self._puts.reserve(
            keys, request.block_bytes, owner=request.owner, tenant=_tenant(request.tenant)
        )
        self._worker.load_changed()
        n_wanted = 0 if lease is None else len(lease.resource.slots)
        tracing.annotate(offered_blocks=len(keys), wanted_blocks=n_wanted)
        if lease is None:
            return kvstore_pb2.ReserveResponse()
        return kvstore_pb2.ReserveResponse(
            reservation_id=lease.lease_id,
            wanted=pack_hashes(list(lease.resource.slots)),
            lease_ms=lease.lease_ms,
        )

    async def Commit(
        self, request: kvstore_pb2.CommitRequest, context: Context
    ) -> kvstore_pb2.CommitResponse:
        if request.transport != TRANSPORTS.value(self._transport.kind):
            name = TRANSPORTS.name(request.transport)
            raise FailedPrecondition(f"this kvstore moves blocks by {self._transport.kind}, not {name}")
        sources = [_source(index, block) for index, block in enumerate(request.blocks)]
        await self._addresses.check_session(request.transport_session)
        timeout_s = _time_for(context, at_most_s=MAX_COMMIT_S)
        started = time.perf_counter()
        try:
            committed, refused = await self._puts.commit(
                request.reservation_id, request.transport_session, sources, timeout_s=timeout_s
            )
        finally:
            self._counters.observe("slipstream_kvstore_commit_seconds", time.perf_counter() - started)
            self._worker.load_changed()
        tracing.annotate(blocks=len(committed), refused_blocks=len(refused))
        # Computed here: the call's deadline uses the wall clock, which may have jumped meanwhile.
        left_s = max(0.0, timeout_s - (time.perf_counter() - started))
        wait_s = left_s if request.wait_durable else 0.0
        return kvstore_pb2.CommitResponse(
            committed=pack_hashes(committed),
            refused=pack_hashes(refused),
            durable=pack_hashes(await self._store.durable(committed, timeout_s=wait_s)),
        )

    async def CancelReservation(
        self, request: kvstore_pb2.CancelReservationRequest, context: Context
    ) -> kvstore_pb2.CancelReservationResponse:
        self._puts.cancel(request.reservation_id)
        self._worker.load_changed()
        return kvstore_pb2.CancelReservationResponse()

    async def VerifyBlocks(
        self, request: kvstore_pb2.VerifyBlocksRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.VerifyBlocksResponse]:
        async with aclosing(self._operations.verify(_hashes(request.block_hashes))) as reports:
            async for progress, last in reports:
                yield kvstore_pb2.VerifyBlocksResponse(
                    copies=progress.copies,
                    verified=progress.verified,
                    corrupt=pack_hashes(progress.corrupt),
                    unreadable=progress.unreadable,
                    last=last,
                )
        self._worker.load_changed()

    async def DropBlocks(
        self, request: kvstore_pb2.DropBlocksRequest, context: Context
    ) -> kvstore_pb2.DropBlocksResponse:
        if request.all == bool(request.block_hashes):
            raise InvalidArgument("block_hashes", "must be given, or all, and not both")
        dropped = await self._operations.drop(None if request.all else _hashes(request.block_hashes))
        self._worker.load_changed()
        return kvstore_pb2.DropBlocksResponse(
            dropped=dropped.copies, blocks=dropped.blocks, pool_kept=dropped.pool_kept
        )

    def measure(self) -> dict[str, float]:
        """The findings of verifications, by metric name."""
        return {"slipstream_kvstore_corrupt_blocks_dram_total": self._operations.corrupt_blocks_dram}

    def _end_pin(self, name_or_lease: str) -> None:
        self._store.release_pin(self._names.end(name_or_lease))
        self._worker.load_changed()

    def _count_pin(self, blocks: Sequence[PinnedBlock], *, elapsed_s: float) -> None:
        slowest = "dram"
        for name, tier in KVSTORE_TIERS.values.items():
            n_bytes = sum(pinned.block.n_bytes for pinned in blocks if pinned.tier == tier)
            self._counters.add(f"slipstream_kvstore_hit_bytes_{name}_total", n_bytes)
            slowest = name if n_bytes else slowest
        self._counters.observe("slipstream_kvstore_pin_seconds", elapsed_s, (slowest,))

    def _release_if_cancelled(self, lease_id: str) -> None:
        """Release the pin if its call is cancelled while the answer is sent: the caller has no lease id."""

        def ended(call: asyncio.Task[Any]) -> None:
            if call.cancelling():  # gRPC itself catches the cancellation
                self._store.release_pin(lease_id)
                self._worker.load_changed()

        call = asyncio.current_task()
        if call is not None:
            call.add_done_callback(ended)


def _time_for(context: Context, *, at_most_s: float) -> float:
    """Seconds to work before the answer must leave for the caller's deadline."""
    left_s = context.time_remaining()
    return at_most_s if left_s is None else max(0.0, min(at_most_s, left_s - ANSWER_MARGIN_S))


def _disk_wait_s(request: kvstore_pb2.PinRequest) -> float:
    """The wait that the caller allows, at most DISK_DEADLINE_S."""
    return min(DISK_DEADLINE_S, request.disk_wait_ms / 1e3 if request.disk_wait_ms else DISK_DEADLINE_S)


def _chain(fingerprint: common_pb2.Fingerprint, packed: bytes) -> list[bytes]:
    if len(fingerprint.digest) != HASH_BYTES:
        raise InvalidArgument("fingerprint.digest", f"must have {HASH_BYTES} bytes")
    hashes = _hashes(packed)
    if len(hashes) > MAX_CHAIN_BLOCKS:
        raise InvalidArgument("block_hashes", f"must be at most {MAX_CHAIN_BLOCKS}, not {len(hashes)}")
    return hashes


def _hashes(packed: bytes) -> list[bytes]:
    try:
        return unpack_hashes(packed)
    except ValueError as error:
        raise InvalidArgument("block_hashes", str(error)) from None


def _tenant(tag: bytes) -> bytes:
    if len(tag) > MAX_TENANT_TAG_BYTES:
        raise InvalidArgument("tenant", f"must have at most {MAX_TENANT_TAG_BYTES} bytes")
    return tag


def _source(index: int, block: kvstore_pb2.SourceBlock) -> PutSource:
    if len(block.block_hash) != HASH_BYTES:
        raise InvalidArgument(f"blocks[{index}].block_hash", f"must have {HASH_BYTES} bytes")
    if len(block.checksum) != CHECKSUM_BYTES:
        raise InvalidArgument(f"blocks[{index}].checksum", f"must have {CHECKSUM_BYTES} bytes")
    return PutSource(block.block_hash, block.address, block.n_bytes, block.checksum)

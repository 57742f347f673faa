"""Serves this worker's prefix cache to peers: the reading half of KvstoreService.

A peer with a prompt whose prefix is cached here pins the blocks, reads them by KvTransport, verifies them and
releases the pin. The peer treats this worker like a kvstore, so the prefix caches of all workers work as one.
This worker evicts blocks that a peer has read before all other unused blocks, because the peer's cache has
them as its newest.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from libs.common.cluster.fingerprint import Fingerprint
from libs.common.rpc.pins.names import MAX_RELEASED, PinNames, bounded_lease_ms
from libs.common.rpc.pins.server import PinServer
from libs.common.rpc.pins.span import traced_pin
from libs.common.transport.base import KvTransport
from libs.engine.step.types import Engine, FullBlock
from libs.worker.engine.engine_thread import EngineThread
from libs.worker.engine.page_exporter import ExportedPage, PageExporter
from libs.worker.requests.request_spec import check_fingerprint
from slipstream.block_hashes import unpack_hashes
from slipstream.enum_names import TRANSPORTS
from slipstream.errors import InvalidArgument, NotFound
from slipstream.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc

MAX_LEASES = 256
# The largest share of the pages under leases, because the engine cannot evict leased pages.
MAX_LEASED_SHARE = 0.25

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True, eq=False)
class _LentBlocks:
    blocks: Sequence[FullBlock]
    exported: Sequence[ExportedPage]
    expiry: asyncio.TimerHandle


class PeerCacheServer(kvstore_pb2_grpc.KvstoreServiceServicer):
    """Implements the pin calls of protos/slipstream/v1/kvstore.proto; other calls are UNIMPLEMENTED."""

    def __init__(
        self, thread: EngineThread, exporter: PageExporter, transport: KvTransport, fingerprint: Fingerprint
    ) -> None:
        self._thread = thread
        self._exporter = exporter
        self._transport = transport
        self._fingerprint = fingerprint
        self._max_blocks = int(MAX_LEASED_SHARE * exporter.n_pages)
        self._leases: dict[str, _LentBlocks] = {}
        self._pinning: set[asyncio.Task[tuple[FullBlock, ...]]] = set()
        self._names = PinNames()
        self._streams = PinServer(self, lambda lease_id: self._end(lease_id))
        self._accepts_pins = True
        self.leased_blocks = 0  # pending pins included

    @property
    def leases(self) -> int:
        """The number of leases, pending pins included."""
        return len(self._leases) + len(self._pinning)

    def stop(self) -> None:
        """Grant no more pins. Present leases continue."""
        self._accepts_pins = False

    def resume(self) -> None:
        """Grant pins again, after `stop`."""
        self._accepts_pins = True

    async def close(self) -> None:
        """End all leases. Reads in progress fail in the transport."""
        self._accepts_pins = False
        self._streams.close()
        await asyncio.gather(*self._pinning, return_exceptions=True)
        for lease_id in list(self._leases):
            self._end(lease_id)

    # ---- rpcs

    async def pin(self, request: kvstore_pb2.PinRequest, context: _Context) -> kvstore_pb2.PinResponse:
        ended = request.released[:MAX_RELEASED]
        for lease_id in ended:
            self._end(self._names.end(lease_id), were_read=True)
        response = await traced_pin(request, self._grant(request))
        response.ended_pins = len(ended)
        return response

    async def _grant(self, request: kvstore_pb2.PinRequest) -> kvstore_pb2.PinResponse:
        check_fingerprint(self._fingerprint, request.fingerprint, of="the request")
        try:
            hashes = unpack_hashes(request.block_hashes)
        except ValueError as error:
            raise InvalidArgument("block_hashes", str(error)) from None
        end = request.first_block + request.max_blocks if request.max_blocks else len(hashes)
        room = self._max_blocks - self.leased_blocks
        wanted = hashes[request.first_block : end][: max(0, room)]
        if not wanted or not self._accepts_pins or self.leases >= MAX_LEASES:
            return kvstore_pb2.PinResponse()
        if not self._names.begin(request.name):
            return kvstore_pb2.PinResponse()
        blocks: Sequence[FullBlock] = ()
        exported: Sequence[ExportedPage] = ()
        lease_id, lease_s = "", 0.0
        try:
            blocks = await self._pin(wanted)
            exported = await self._exporter.export([block.page for block in blocks])
            self._unpin(blocks[len(exported) :])
            blocks = blocks[: len(exported)]
            if blocks and self._accepts_pins:
                lease_id, lease_s = self._begin(blocks, exported, request.lease_ms)
        finally:
            if not lease_id:
                self._exporter.release(exported)
                self._unpin(blocks)
            if not self._names.done(request.name, lease_id):  # the reader has already released the pin
                self._end(lease_id)
        if lease_id not in self._leases:
            return kvstore_pb2.PinResponse()
        return self._pinned(exported, lease_id, lease_s)

    def _pinned(
        self, exported: Sequence[ExportedPage], lease_id: str, lease_s: float
    ) -> kvstore_pb2.PinResponse:
        return kvstore_pb2.PinResponse(
            lease_id=lease_id,
            transport=TRANSPORTS.value(self._transport.kind),
            transport_session=self._transport.session_id,
            blocks=[
                kvstore_pb2.PinnedBlock(
                    address=page.address,
                    n_bytes=self._exporter.page_bytes,
                    checksum=page.checksum,
                    tier=common_pb2.CACHE_TIER_PEER,
                )
                for page in exported
            ],
            lease_ms=int(lease_s * 1e3),
        )

    async def renew_pin(
        self, request: kvstore_pb2.RenewPinRequest, context: _Context
    ) -> kvstore_pb2.RenewPinResponse:
        lease = self._leases.get(request.lease_id)
        if lease is None:
            raise NotFound("the lease has ended", field="lease_id")
        lease.expiry.cancel()
        lease.expiry = self._expire(request.lease_id, bounded_lease_ms(request.lease_ms) / 1e3)
        return kvstore_pb2.RenewPinResponse()

    async def release_pin(
        self, request: kvstore_pb2.ReleasePinRequest, context: _Context
    ) -> kvstore_pb2.ReleasePinResponse:
        self._end(self._names.end(request.lease_id), were_read=True)
        return kvstore_pb2.ReleasePinResponse()

    async def Pins(
        self, request_iterator: AsyncIterator[kvstore_pb2.PinsRequest], context: _Context
    ) -> AsyncIterator[kvstore_pb2.PinsResponse]:
        async with aclosing(self._streams.serve(request_iterator)) as frames:
            async for frame in frames:
                yield frame

    # ---- leases

    async def _pin(self, hashes: Sequence[bytes]) -> tuple[FullBlock, ...]:
        """Pin the leading blocks that the cache has. If the caller is cancelled, no page stays pinned."""
        self.leased_blocks += len(hashes)  # an upper bound until the engine has pinned them

        def correct_count(task: asyncio.Task[tuple[FullBlock, ...]]) -> None:
            self._pinning.discard(task)
            failed = task.cancelled() or task.exception() is not None
            self.leased_blocks -= len(hashes) - (0 if failed else len(task.result()))

        task = asyncio.create_task(self._thread.call(lambda engine: _pin_leading(engine, hashes)))
        self._pinning.add(task)
        task.add_done_callback(correct_count)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._unpin_result)
            raise

    def _unpin_result(self, task: asyncio.Task[tuple[FullBlock, ...]]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._unpin(task.result())

    def _begin(
        self, blocks: Sequence[FullBlock], exported: Sequence[ExportedPage], asked_ms: int
    ) -> tuple[str, float]:
        lease_id, lease_s = secrets.token_hex(16), bounded_lease_ms(asked_ms) / 1e3
        self._leases[lease_id] = _LentBlocks(blocks, exported, self._expire(lease_id, lease_s))
        return lease_id, lease_s

    def _expire(self, lease_id: str, lease_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(lease_s, lambda: self._end(lease_id))

    def _end(self, lease_id: str, *, were_read: bool = False) -> None:
        """End a lease, if it has not ended. `were_read`: the reader released it after its read."""
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            lease.expiry.cancel()
            self._exporter.release(lease.exported)
            self._unpin(lease.blocks, evict_first=were_read)

    def _unpin(self, blocks: Sequence[FullBlock], *, evict_first: bool = False) -> None:
        self.leased_blocks -= len(blocks)
        if blocks:
            self._thread.unpin([block.page for block in blocks], evict_first=evict_first)


def _pin_leading(engine: Engine, hashes: Sequence[bytes]) -> tuple[FullBlock, ...]:
    found = engine.pin_blocks([FullBlock(block_hash, -1) for block_hash in hashes])
    n = next((i for i, block in enumerate(found) if block.hash != hashes[i]), len(found))
    engine.unpin([block.page for block in found[n:]])
    return found[:n]

"""The prefix cache of this worker, lent to others: the reading half of KvstoreService.

Another prefill worker that was given a prompt whose prefix lies here pins the blocks, reads them by
KvTransport, checks them, and releases: to it this worker is one more kvstore. So the prefix caches of all
workers are one cache, whoever computes. Blocks that were read are the first to be evicted here when nothing
else uses them: their reader has them now, as its newest, and no block stays in two caches for long.
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
from libs.common.rpc.pin_names import MAX_RELEASED, PinNames
from libs.common.rpc.pin_server import PinServer
from libs.common.rpc.pin_span import traced_pin
from libs.common.transport.base import KvTransport
from libs.engine.step.types import Engine, FullBlock
from libs.worker.engine.engine_thread import EngineThread
from libs.worker.engine.page_memory import PageMemory
from libs.worker.requests.request_spec import check_fingerprint
from slipstream.block_hashes import unpack_hashes
from slipstream.enum_names import transport_value
from slipstream.errors import InvalidArgument, NotFound
from slipstream.v1 import common_pb2, kvstore_pb2, kvstore_pb2_grpc

DEFAULT_LEASE_MS = 10_000
MAX_LEASE_MS = 60_000
MAX_LOANS = 256
# The share of the pages that may be lent at once: what is lent cannot be evicted.
MAX_LENT_SHARE = 0.25

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True, eq=False)
class _Loan:
    blocks: Sequence[FullBlock]
    lease_s: float
    expiry: asyncio.TimerHandle


class PeerCacheServer(kvstore_pb2_grpc.KvstoreServiceServicer):
    """Pins and their ends, as protos/slipstream/v1/kvstore.proto says; the rest is unimplemented."""

    def __init__(
        self, thread: EngineThread, memory: PageMemory, transport: KvTransport, fingerprint: Fingerprint
    ) -> None:
        self._thread = thread
        self._memory = memory
        self._transport = transport
        self._fingerprint = fingerprint
        self._max_blocks = int(MAX_LENT_SHARE * memory.n_bytes / memory.page_bytes)
        self._loans: dict[str, _Loan] = {}
        self._pinning: set[asyncio.Task[tuple[FullBlock, ...]]] = set()
        self._names = PinNames()
        self._streams = PinServer(self, lambda lease_id: self._end(lease_id, spent=False))
        self._lends = True
        self.lent_blocks = 0  # now

    @property
    def loans(self) -> int:
        """Those that have not ended, and those being made."""
        return len(self._loans) + len(self._pinning)

    def stop(self) -> None:
        """Lend no more; loans that run go on."""
        self._lends = False

    async def close(self) -> None:
        """End all loans: who still reads finds out by the transport."""
        self._lends = False
        self._streams.close()
        await asyncio.gather(*self._pinning, return_exceptions=True)
        for lease_id in list(self._loans):
            self._end(lease_id, spent=False)

    # ---- rpcs

    async def pin(self, request: kvstore_pb2.PinRequest, context: _Context) -> kvstore_pb2.PinResponse:
        ended = request.released[:MAX_RELEASED]
        for lease_id in ended:
            self._end(self._names.end(lease_id), spent=True)
        response = await traced_pin(request, self._pin_and_lend(request))
        response.ended_pins = len(ended)
        return response

    async def _pin_and_lend(self, request: kvstore_pb2.PinRequest) -> kvstore_pb2.PinResponse:
        check_fingerprint(self._fingerprint, request.fingerprint, whose="the request")
        try:
            hashes = unpack_hashes(request.block_hashes)
        except ValueError as error:
            raise InvalidArgument("block_hashes", str(error)) from None
        end = request.first_block + request.max_blocks if request.max_blocks else len(hashes)
        room = self._max_blocks - self.lent_blocks
        wanted = hashes[request.first_block : end][: max(0, room)]
        if not wanted or not self._lends or self.loans >= MAX_LOANS:
            return kvstore_pb2.PinResponse()
        if not self._names.begin(request.name):
            return kvstore_pb2.PinResponse()
        blocks: Sequence[FullBlock] = ()
        lease_id, lease_s = "", 0.0
        try:
            blocks = await self._pin(wanted)
            checksums = await self._memory.checksums([block.page for block in blocks])
            if blocks and self._lends:
                lease_id, lease_s = self._lend(blocks, request.lease_ms)
        finally:
            if not lease_id:
                self._unpin(blocks, spent=False)
            if not self._names.done(request.name, lease_id):  # it was ended while it was made
                self._end(lease_id, spent=False)
        if lease_id not in self._loans:
            return kvstore_pb2.PinResponse()
        return kvstore_pb2.PinResponse(
            lease_id=lease_id,
            transport=transport_value(self._transport.kind),
            transport_session=self._transport.session_id,
            blocks=[
                kvstore_pb2.PinnedBlock(
                    address=self._memory.address_of(block.page),
                    n_bytes=self._memory.page_bytes,
                    checksum=checksum,
                    tier=common_pb2.CACHE_TIER_PEER,
                )
                for block, checksum in zip(blocks, checksums, strict=True)
            ],
            lease_ms=int(lease_s * 1e3),
        )

    async def renew_pin(
        self, request: kvstore_pb2.RenewPinRequest, context: _Context
    ) -> kvstore_pb2.RenewPinResponse:
        loan = self._loans.get(request.lease_id)
        if loan is None:
            raise NotFound("the lease has ended", field="lease_id")
        loan.expiry.cancel()
        loan.lease_s = _granted_s(request.lease_ms)
        loan.expiry = self._expire(request.lease_id, loan.lease_s)
        return kvstore_pb2.RenewPinResponse()

    async def release_pin(
        self, request: kvstore_pb2.ReleasePinRequest, context: _Context
    ) -> kvstore_pb2.ReleasePinResponse:
        self._end(self._names.end(request.lease_id), spent=True)
        return kvstore_pb2.ReleasePinResponse()

    async def Pins(
        self, request_iterator: AsyncIterator[kvstore_pb2.PinsRequest], context: _Context
    ) -> AsyncIterator[kvstore_pb2.PinsResponse]:
        async with aclosing(self._streams.serve(request_iterator)) as frames:
            async for frame in frames:
                yield frame

    # ---- loans

    async def _pin(self, hashes: Sequence[bytes]) -> tuple[FullBlock, ...]:
        """The leading ones that are held, pinned. A cancelled caller leaves nothing pinned."""
        self.lent_blocks += len(hashes)  # all of them, until it is known: who asks meanwhile gets the rest

        def counted(task: asyncio.Task[tuple[FullBlock, ...]]) -> None:
            self._pinning.discard(task)
            failed = task.cancelled() or task.exception() is not None
            self.lent_blocks -= len(hashes) - (0 if failed else len(task.result()))

        task = asyncio.create_task(self._thread.call(lambda engine: _pin_leading(engine, hashes)))
        self._pinning.add(task)
        task.add_done_callback(counted)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._let_go)
            raise

    def _let_go(self, task: asyncio.Task[tuple[FullBlock, ...]]) -> None:
        if not task.cancelled() and task.exception() is None:
            self._unpin(task.result(), spent=False)

    def _lend(self, blocks: Sequence[FullBlock], asked_ms: int) -> tuple[str, float]:
        lease_id, lease_s = secrets.token_hex(16), _granted_s(asked_ms)
        self._loans[lease_id] = _Loan(blocks, lease_s, self._expire(lease_id, lease_s))
        return lease_id, lease_s

    def _expire(self, lease_id: str, lease_s: float) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(lease_s, lambda: self._end(lease_id, spent=False))

    def _end(self, lease_id: str, *, spent: bool) -> None:
        loan = self._loans.pop(lease_id, None)
        if loan is not None:
            loan.expiry.cancel()
            self._unpin(loan.blocks, spent=spent)

    def _unpin(self, blocks: Sequence[FullBlock], *, spent: bool) -> None:
        self.lent_blocks -= len(blocks)
        if blocks:
            pages = [block.page for block in blocks]
            self._thread.submit(lambda engine: engine.unpin(pages, spent=spent))


def _pin_leading(engine: Engine, hashes: Sequence[bytes]) -> tuple[FullBlock, ...]:
    found = engine.pin_blocks([FullBlock(block_hash, -1) for block_hash in hashes])
    n = next((i for i, block in enumerate(found) if block.hash != hashes[i]), len(found))
    engine.unpin([block.page for block in found[n:]])
    return found[:n]


def _granted_s(asked_ms: int) -> float:
    return (min(asked_ms, MAX_LEASE_MS) if asked_ms > 0 else DEFAULT_LEASE_MS) / 1e3

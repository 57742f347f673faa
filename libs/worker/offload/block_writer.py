"""Writes new full blocks to kvstores in the background. Their pages stay pinned until the commit returns.

Each kvstore has a queue, and one bound covers all queues. After a failure the writer drops the kvstore's
blocks and pauses: storing helps later requests and is never required.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from libs.common.cluster.fingerprint import Fingerprint
from libs.common.telemetry.logs import log_no_request
from libs.common.telemetry.tracing import TraceMetadata
from libs.common.transport.base import KvTransport
from libs.engine.step.types import FullBlock
from libs.worker.engine.engine_thread import EngineThread
from libs.worker.engine.page_exporter import ExportedPage, PageExporter
from libs.worker.pins.peers import Peers
from libs.worker.requests.tenant_tag import tenant_tag
from slipstream.block_hashes import pack_hashes, unpack_hashes
from slipstream.enum_names import TRANSPORTS
from slipstream.errors import DataCorrupt, SlipstreamError, Unavailable
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import kvstore_pb2, kvstore_pb2_grpc

log = logging.getLogger(__name__)

_BATCH_BLOCKS = 64
_RESERVE_TIMEOUT_S = 2.0
_COMMIT_TIMEOUT_S = 15.0
# The pause after a failure. With the time to detect a dropped connection (slipstream/rpc/backoff.py) it stays
# below 5 s.
_BACK_OFF_S = 0.3
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class _WriteContext:
    """The tenant tag and the trace context of a block's request."""

    tenant: bytes
    trace: TraceMetadata


class BlockWriter:
    """The writer of one worker. `max_pinned_blocks` bounds the pages that it keeps pinned."""

    def __init__(
        self,
        thread: EngineThread,
        exporter: PageExporter,
        transport: KvTransport,
        peers: Peers,
        *,
        instance: str,
        fingerprint: Fingerprint,
        max_pinned_blocks: int,
    ) -> None:
        self._thread = thread
        self._exporter = exporter
        self._transport = transport
        self._peers = peers
        self._instance = instance
        self._fingerprint = fingerprint
        self._max_pinned_blocks = max_pinned_blocks
        self._queues: dict[str, collections.deque[FullBlock]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._paused_until_s: dict[str, float] = {}
        self._waiting: dict[tuple[str, bytes], _WriteContext] = {}
        self._pinning: set[asyncio.Future[tuple[FullBlock, ...]]] = set()
        self._closed = False
        self.pinned_blocks = 0
        self.reservations = 0
        self.dropped_blocks = 0

    def offer(
        self, endpoint: str, blocks: Sequence[FullBlock], *, salt: bytes = b"", trace: TraceMetadata = ()
    ) -> None:
        """Queue blocks for storing; returns at once. Blocks that left their pages are skipped.

        `salt` is the tenant's and `trace` the request's; a batch belongs to the trace of its first block.
        Blocks beyond the bound are dropped from the end, because later blocks of a chain are useless without
        the earlier ones.
        """
        if not endpoint or self._closed:
            return
        fresh = [b for b in blocks if (endpoint, b.hash) not in self._waiting]
        if time.monotonic() < self._paused_until_s.get(endpoint, 0.0):
            self.dropped_blocks += len(fresh)
            return
        taken = fresh[: max(self._max_pinned_blocks - self.pinned_blocks, 0)]
        self.dropped_blocks += len(fresh) - len(taken)
        if not taken:
            return
        self.pinned_blocks += len(taken)
        origin = _WriteContext(tenant_tag(salt), trace)
        self._waiting.update(dict.fromkeys(((endpoint, block.hash) for block in taken), origin))
        # After a failed step other blocks may already be in the pages. So the engine pins by hash, and
        # returns the blocks that it found.
        pinning = self._thread.submit(lambda engine: engine.pin_blocks(taken))
        self._pinning.add(pinning)
        pinning.add_done_callback(lambda done: self._queue(endpoint, taken, done))

    def _queue(
        self, endpoint: str, offered: Sequence[FullBlock], pinning: asyncio.Future[tuple[FullBlock, ...]]
    ) -> None:
        """Queue the blocks that could be pinned and drop the others."""
        self._pinning.discard(pinning)
        held = () if pinning.exception() is not None else pinning.result()
        found = {block.hash for block in held}
        lost = [block for block in offered if block.hash not in found]
        self.dropped_blocks += len(lost)
        self._remove(endpoint, lost)
        if self._closed:
            self._unpin(endpoint, held)
            return
        if not held:
            return
        self._queues.setdefault(endpoint, collections.deque()).extend(held)
        if endpoint not in self._tasks:
            self._tasks[endpoint] = asyncio.create_task(self._drain_queue(endpoint), name=f"store {endpoint}")

    async def flush(self, *, timeout_s: float) -> None:
        """Return when all queues are empty, or after the time-out."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while loop.time() < until_s:
            waiting: list[asyncio.Future[Any]] = [*self._tasks.values(), *self._pinning]
            if not waiting:
                return
            await asyncio.wait(waiting, timeout=until_s - loop.time())

    async def close(self) -> None:
        """Flush for at most _CLOSE_S, then cancel the writes and unpin all blocks."""
        self._closed = True
        await self.flush(timeout_s=_CLOSE_S)
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _drain_queue(self, endpoint: str) -> None:
        log_no_request()
        queue = self._queues[endpoint]
        try:
            while queue:
                batch, origin = self._next_batch(endpoint, queue)
                try:
                    await self._store(endpoint, batch, origin)
                except SlipstreamError as error:
                    log.warning("kvstore %s failed to store blocks: %s", endpoint, error)
                    now_s = time.monotonic()
                    self._paused_until_s = {
                        each: until_s for each, until_s in self._paused_until_s.items() if until_s > now_s
                    }
                    self._paused_until_s[endpoint] = now_s + _BACK_OFF_S
                    self.dropped_blocks += len(batch) + len(queue)
                    batch += queue
                    queue.clear()
                finally:
                    self._unpin(endpoint, batch)
        finally:
            self._unpin(endpoint, list(queue))
            del self._queues[endpoint], self._tasks[endpoint]

    def _next_batch(
        self, endpoint: str, queue: collections.deque[FullBlock]
    ) -> tuple[list[FullBlock], _WriteContext]:
        """Remove the first blocks of one tenant from the queue. Returns them with the first one's origin."""
        first = self._waiting[endpoint, queue[0].hash]
        batch = [queue.popleft()]
        while queue and len(batch) < _BATCH_BLOCKS:
            if self._waiting[endpoint, queue[0].hash].tenant != first.tenant:
                break
            batch.append(queue.popleft())
        return batch, first

    def _unpin(self, endpoint: str, blocks: Sequence[FullBlock]) -> None:
        if not blocks:
            return
        self._thread.unpin([block.page for block in blocks])
        self._remove(endpoint, blocks)

    def _remove(self, endpoint: str, blocks: Sequence[FullBlock]) -> None:
        self.pinned_blocks -= len(blocks)
        for block in blocks:
            self._waiting.pop((endpoint, block.hash), None)

    async def _store(self, endpoint: str, batch: Sequence[FullBlock], origin: _WriteContext) -> None:
        """Run both phases of one put. Raises SlipstreamError."""
        stub = kvstore_pb2_grpc.KvstoreServiceStub(self._peers.channel(endpoint))
        self.reservations += 1
        reserving = asyncio.ensure_future(
            stub.Reserve(
                self._reserve_request(batch, origin.tenant), timeout=_RESERVE_TIMEOUT_S, metadata=origin.trace
            )
        )
        has_ended = False  # whether the kvstore has ended the reservation
        try:
            reserved = await asyncio.shield(reserving)
            wanted = set(unpack_hashes(reserved.wanted))
            chosen = [block for block in batch if block.hash in wanted]
            n_left = len(chosen)
            while chosen:
                exported = await self._export(chosen)
                try:
                    request = self._commit_request(reserved.reservation_id, chosen, exported)
                    answer = await stub.Commit(request, timeout=_COMMIT_TIMEOUT_S, metadata=origin.trace)
                finally:
                    self._exporter.release(exported)
                stored = len(unpack_hashes(answer.committed))
                self.dropped_blocks += len(exported) - stored
                n_left -= stored
                chosen = chosen[len(exported) :]
            has_ended = not n_left
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        except ValueError as error:  # of `unpack_hashes`
            raise DataCorrupt(f"malformed hashes in an answer: {error}") from None
        finally:
            if has_ended:
                self.reservations -= 1
            else:
                await asyncio.shield(asyncio.ensure_future(self._cancel(stub, reserving)))

    async def _export(self, blocks: Sequence[FullBlock]) -> list[ExportedPage]:
        """Export the leading blocks, at least one. Raises Unavailable when there is no room in time."""
        pages, changed = [block.page for block in blocks], asyncio.Event()
        try:
            async with asyncio.timeout(_COMMIT_TIMEOUT_S):
                while not (exported := await self._exporter.export(pages)):
                    changed.clear()
                    await self._exporter.wait_for_room(changed)
        except TimeoutError:
            raise Unavailable("no staging memory for blocks to store") from None
        return exported

    async def _cancel(
        self,
        stub: kvstore_pb2_grpc.KvstoreServiceAsyncStub,
        reserving: asyncio.Future[kvstore_pb2.ReserveResponse],
    ) -> None:
        try:
            reservation_id = (await reserving).reservation_id
            if reservation_id:
                request = kvstore_pb2.CancelReservationRequest(reservation_id=reservation_id)
                await stub.CancelReservation(request, timeout=_RESERVE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            log.info("a reservation was not cancelled, it ends with its lease: %s", error.code())
        finally:
            self.reservations -= 1

    def _reserve_request(self, batch: Sequence[FullBlock], tenant: bytes) -> kvstore_pb2.ReserveRequest:
        return kvstore_pb2.ReserveRequest(
            fingerprint=self._fingerprint.to_proto(),
            block_hashes=pack_hashes([block.hash for block in batch]),
            block_bytes=self._exporter.page_bytes,
            owner=self._instance,
            tenant=tenant,
        )

    def _commit_request(
        self, reservation_id: str, blocks: Sequence[FullBlock], exported: Sequence[ExportedPage]
    ) -> kvstore_pb2.CommitRequest:
        return commit_request(
            reservation_id,
            blocks,
            exported,
            page_bytes=self._exporter.page_bytes,
            transport=self._transport,
        )


def commit_request(
    reservation_id: str,
    blocks: Sequence[FullBlock],
    exported: Sequence[ExportedPage],
    *,
    page_bytes: int,
    transport: KvTransport,
) -> kvstore_pb2.CommitRequest:
    """The request of a put's second phase, for the leading blocks, which are exported."""
    return kvstore_pb2.CommitRequest(
        reservation_id=reservation_id,
        transport=TRANSPORTS.value(transport.kind),
        transport_session=transport.session_id,
        blocks=[
            kvstore_pb2.SourceBlock(
                block_hash=block.hash, address=page.address, n_bytes=page_bytes, checksum=page.checksum
            )
            for block, page in zip(blocks, exported, strict=False)
        ],
    )

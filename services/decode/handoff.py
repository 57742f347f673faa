"""The fetcher's side of a handoff: watch what is ready, read it, verify it, release it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
from collections.abc import Coroutine, Sequence
from typing import Any

import grpc

from libs.common.checksum import CHECKSUM_BYTES
from libs.common.telemetry import tracing
from libs.worker.requests.clock import left_s
from libs.worker.restore.block_fetcher import BlockFetcher, FetchStats, RemoteBlock
from slipstream.errors import Aborted, Internal, Unavailable
from slipstream.rpc.rpc_errors import from_failure, from_rpc_error
from slipstream.v1 import prefill_pb2, prefill_pb2_grpc

log = logging.getLogger(__name__)

_LANES = 2  # reads of one sequence at a time; the fetcher bounds those of all
_RPC_TIMEOUT_S = 2.0
_RELEASE_TRIES = 3


class HandoffPull:
    """One handoff of one sequence. `release` always, however `run` ended."""

    def __init__(
        self,
        ticket: prefill_pb2.HandoffTicket,
        channel: grpc.aio.Channel,
        fetcher: BlockFetcher,
        *,
        pages: Sequence[int],
        first_block: int,
        stats: FetchStats,
        deadline_s: float | None = None,
        draft_rows: int = 0,
    ) -> None:
        """`pages`: one for each block of the ticket; those before `first_block` hold their KV already.

        `deadline_s`: the request's, on the event loop's clock; the watch ends with it at the latest.
        `draft_rows`: of the prompt's features, that its end may name.
        """
        self._ticket = ticket
        self._stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._fetcher = fetcher
        self._pages = pages
        self._first_block = first_block
        self._stats = stats
        self._deadline_s = deadline_s
        self._draft_rows = draft_rows
        self._ready: collections.deque[tuple[int, RemoteBlock]] = collections.deque()
        self._read: list[int] = []  # blocks that the exporter does not know to be read
        self._has_read = asyncio.Event()
        self._changed = asyncio.Event()
        self._n_announced = 0
        self._complete: prefill_pb2.HandoffComplete | None = None

    async def run(self) -> prefill_pb2.HandoffComplete:
        """All blocks are in their pages and verified, or the request ended with its first token.

        Raises TransferError, DataCorrupt, and the exporter's errors (Unavailable when it is gone).
        """
        with tracing.span("transfer", source=self._ticket.control_endpoint) as opened:
            try:
                await _all_or_first_error(
                    self._watch(),
                    *(self._pull() for _ in range(_LANES)),
                    forever=self._renew(),
                )
            finally:
                tracing.annotate(
                    opened,
                    blocks=self._stats.n_blocks,
                    bytes=self._stats.n_bytes,
                    read_ms=self._stats.elapsed_ms,
                    held_blocks=self._first_block,
                )
        assert self._complete is not None
        return self._complete

    async def release(self) -> None:
        """Release the blocks at the exporter; where that fails, their lease ends them."""
        request = prefill_pb2.ReleaseHandoffRequest(handoff_id=self._ticket.handoff_id)
        for _ in range(_RELEASE_TRIES):
            try:
                await self._stub.ReleaseHandoff(request, timeout=_RPC_TIMEOUT_S)
                return
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    break
                await asyncio.sleep(0.1)
        log.info("handoff %s is left to its lease", self._ticket.handoff_id)

    async def _watch(self) -> None:
        request = prefill_pb2.WatchHandoffRequest(
            handoff_id=self._ticket.handoff_id,
            attempt=self._ticket.attempt,
            first_block=self._first_block,
            draft_rows=self._draft_rows,
        )
        try:
            events = self._stub.WatchHandoff(
                request, timeout=left_s(self._deadline_s), metadata=tracing.trace_metadata()
            )
            # Not `async for`: its suspended generator and the call refer to each other, and would keep the
            # last event until a garbage collection.
            while isinstance(event := await events.read(), prefill_pb2.WatchHandoffResponse):
                if event.HasField("failure"):
                    error = from_failure(event.failure)
                    if isinstance(error, Aborted):  # the export was, not this sequence
                        raise Unavailable(f"the exporter ended the handoff: {error.message}")
                    raise error
                if event.HasField("ready"):
                    self._announce(event.ready)
                elif event.HasField("complete"):
                    if not event.complete.finish_reason and self._n_announced < len(self._ticket.blocks):
                        raise Internal("the handoff is complete before all its blocks are")
                    self._complete = event.complete
                    self._changed.set()
                    return
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:  # not by us: the exporter shuts down
                raise Unavailable("the exporter cancelled the handoff") from None
            raise from_rpc_error(error) from None
        raise Unavailable("the exporter ended the handoff without a reason")

    def _announce(self, ready: prefill_pb2.BlocksReady) -> None:
        checksums = [
            ready.checksums[at : at + CHECKSUM_BYTES] for at in range(0, len(ready.checksums), CHECKSUM_BYTES)
        ]
        first, end = ready.first_block, ready.first_block + len(checksums)
        if first != self._n_announced or end > len(self._ticket.blocks):
            raise Internal(f"blocks [{first}, {end}) announced after {self._n_announced}")
        if len(ready.addresses) != len(checksums):
            raise Internal(f"{len(ready.addresses)} addresses announced for {len(checksums)} blocks")
        self._n_announced = end
        for block, address, checksum in zip(range(first, end), ready.addresses, checksums, strict=True):
            if block >= self._first_block:
                self._ready.append((block, RemoteBlock(self._pages[block], address, checksum)))
        self._changed.set()

    async def _pull(self) -> None:
        while True:
            if self._complete is not None and self._complete.finish_reason:
                return
            batch = [self._ready.popleft() for _ in range(min(len(self._ready), self._fetcher.batch_blocks))]
            if batch:
                remote = [block for _, block in batch]
                await self._fetcher.pull(self._ticket.transport_session, remote, self._stats)
                self._read += [number for number, _ in batch]
                if self._n_announced < len(self._ticket.blocks):
                    self._has_read.set()  # the exporter may wait for room
                continue
            if self._complete is not None:
                self._changed.set()  # the other lane may sleep
                return
            self._changed.clear()
            await self._changed.wait()

    async def _renew(self) -> None:
        """Report blocks that were read. The open watch renews the lease; afterwards this does."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ticket.lease_ms / 3e3):
                    await self._has_read.wait()
            self._has_read.clear()
            if self._complete is None and not self._read:
                continue
            read, self._read = self._read, []
            request = prefill_pb2.RenewHandoffRequest(
                handoff_id=self._ticket.handoff_id, lease_ms=self._ticket.lease_ms, read_blocks=read
            )
            try:
                await self._stub.RenewHandoff(request, timeout=_RPC_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    if self._complete is None:
                        continue  # the watch says why it ended
                    raise from_rpc_error(error) from None
                log.warning("handoff %s is not renewed: %s", self._ticket.handoff_id, error.code())
                self._read += read


async def _all_or_first_error(*parts: Coroutine[Any, Any, None], forever: Coroutine[Any, Any, None]) -> None:
    """Run the parts to their end beside one that never ends by itself. The first error cancels the rest,
    and is raised once all of them have stopped; so does a cancel of the caller."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    background = asyncio.ensure_future(forever)
    waiting = {*tasks, background}
    try:
        while not all(task.done() for task in tasks):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
    finally:
        for task in (*tasks, background):
            task.cancel()
        await asyncio.gather(*tasks, background, return_exceptions=True)

"""KvEventService over gRPC, for every node with KV blocks.

    log = BlockEventLog(identity.incarnation)
    events = KvEventServicer(log)
    add_KvEventServiceServicer_to_server(events, host.server)
    events.stored(tier, hashes)       # from the event loop; never blocks
    events.removed(tier, hashes)

A watcher's only state is its position in the log. gRPC's flow control makes a slow watcher fall behind; when
the log no longer has the change it needs, its call ends with ABORTED.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import grpc

from libs.common.kv_events.log import BlockChange, BlockEventLog, EventsExpired, HeldSnapshot
from slipstream.block_hashes import HASH_BYTES
from slipstream.errors import Overloaded
from slipstream.v1 import common_pb2, kv_events_pb2, kv_events_pb2_grpc

# While a snapshot is sent it takes 16 bytes for each block.
MAX_WATCHERS = 64
SNAPSHOT_PIECE_BLOCKS = 16_384


class KvEventServicer(kv_events_pb2_grpc.KvEventServiceServicer):
    """The servicer. Changes are recorded through it, so that it can wake the watchers."""

    def __init__(self, log: BlockEventLog) -> None:
        self._log = log
        self._watchers: set[asyncio.Event] = set()

    @property
    def watchers(self) -> int:
        """The number of open calls."""
        return len(self._watchers)

    def stored(self, tier: common_pb2.CacheTier.ValueType, hashes: Iterable[bytes]) -> None:
        """Record stored blocks."""
        if self._log.stored(tier, hashes):
            self._wake()

    def removed(self, tier: common_pb2.CacheTier.ValueType, hashes: Iterable[bytes]) -> None:
        """Record removed blocks."""
        if self._log.removed(tier, hashes):
            self._wake()

    async def WatchBlocks(
        self,
        request: kv_events_pb2.WatchBlocksRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[kv_events_pb2.WatchBlocksResponse]:
        if len(self._watchers) >= MAX_WATCHERS:
            raise Overloaded(f"this node has {MAX_WATCHERS} watchers, the maximum")
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            at = request.after_sequence
            if request.incarnation != self._log.incarnation or not self._log.can_resume(at):
                snapshot = self._log.snapshot()
                at = snapshot.sequence
                for piece in snapshot_responses(self._log.incarnation, snapshot):
                    yield piece
            while True:
                changed.clear()
                while (change := self._log.after(at)) is not None:
                    yield _response(self._log.incarnation, change)
                    at = change.sequence
                await changed.wait()
        except EventsExpired as error:
            await context.abort(grpc.StatusCode.ABORTED, f"the watcher is too slow: {error.message}")
        finally:
            self._watchers.discard(changed)

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()


def snapshot_responses(
    incarnation: str, snapshot: HeldSnapshot, *, piece_blocks: int = SNAPSHOT_PIECE_BLOCKS
) -> Iterator[kv_events_pb2.WatchBlocksResponse]:
    """The pieces of a snapshot: at least one, the last one marked."""
    piece_bytes = piece_blocks * HASH_BYTES
    pieces = [
        kv_events_pb2.BlocksChanged(block_hashes=packed[start : start + piece_bytes], tier=_tier(tier))
        for tier, packed in snapshot.held.items()
        for start in range(0, len(packed), piece_bytes)
    ]
    for index in range(max(1, len(pieces))):
        yield kv_events_pb2.WatchBlocksResponse(
            incarnation=incarnation,
            sequence=snapshot.sequence,
            snapshot=kv_events_pb2.BlocksSnapshot(
                held=pieces[index : index + 1], last=index + 1 >= len(pieces)
            ),
        )


def _response(incarnation: str, change: BlockChange) -> kv_events_pb2.WatchBlocksResponse:
    changed = kv_events_pb2.BlocksChanged(block_hashes=change.hashes, tier=_tier(change.tier))
    response = kv_events_pb2.WatchBlocksResponse(incarnation=incarnation, sequence=change.sequence)
    (response.stored if change.stored else response.removed).CopyFrom(changed)
    return response


def _tier(tier: int) -> common_pb2.CacheTier.ValueType:
    return common_pb2.CacheTier.ValueType(tier)

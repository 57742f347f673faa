"""A watcher's copy of one node's KV blocks, built from `WatchBlocks`. Pure.

    view = BlockView()
    while True:
        async for response in stub.WatchBlocks(view.resume()):
            view.apply(response)          # after EventMissed, open the call again with `resume`

Between two calls the view keeps its last state, which may be old but is consistent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from slipstream.block_hashes import unpack_hashes
from slipstream.errors import Unavailable
from slipstream.v1 import kv_events_pb2


class EventMissed(Unavailable):
    """A response does not follow the last one that was applied."""


class EventCursor(ABC):
    """A watcher's position, `sequence` of `incarnation`. A subclass stores the blocks."""

    def __init__(self) -> None:
        self.incarnation = ""
        self.sequence = 0
        self._in_snapshot = False

    @abstractmethod
    def stored(self, tier: int, hashes: list[bytes]) -> None:
        """Add blocks to a tier."""

    @abstractmethod
    def removed(self, tier: int, hashes: list[bytes]) -> None:
        """Remove blocks from a tier."""

    @abstractmethod
    def in_snapshot(self, tier: int, hashes: list[bytes]) -> None:
        """Add blocks of a snapshot that is not complete yet."""

    @abstractmethod
    def end_snapshot(self, *, complete: bool) -> None:
        """Replace all blocks by those `in_snapshot`; or drop the latter if the snapshot is not `complete`."""

    def resume(self) -> kv_events_pb2.WatchBlocksRequest:
        """The request that continues from here. Drops an incomplete snapshot."""
        self._end_snapshot(complete=False)
        return kv_events_pb2.WatchBlocksRequest(incarnation=self.incarnation, after_sequence=self.sequence)

    def apply(self, response: kv_events_pb2.WatchBlocksResponse) -> None:
        """Apply the next response of a call. Raises EventMissed; ValueError for malformed hashes."""
        event = response.WhichOneof("event")
        if event == "snapshot":
            self._apply_piece(response)
            return
        if (
            self._in_snapshot
            or response.incarnation != self.incarnation
            or response.sequence != self.sequence + 1
        ):
            raise EventMissed(f"change {response.sequence} does not follow change {self.sequence}")
        self.sequence = response.sequence
        if event == "stored":
            self.stored(response.stored.tier, unpack_hashes(response.stored.block_hashes))
        elif event == "removed":
            self.removed(response.removed.tier, unpack_hashes(response.removed.block_hashes))

    def _apply_piece(self, response: kv_events_pb2.WatchBlocksResponse) -> None:
        self._in_snapshot = True
        for piece in response.snapshot.held:
            self.in_snapshot(piece.tier, unpack_hashes(piece.block_hashes))
        if response.snapshot.last:
            self.incarnation, self.sequence = response.incarnation, response.sequence
            self._end_snapshot(complete=True)

    def _end_snapshot(self, *, complete: bool) -> None:
        if self._in_snapshot:
            self._in_snapshot = False
            self.end_snapshot(complete=complete)


class BlockView(EventCursor):
    """The hashes of a node's blocks by tier, up to `sequence` of `incarnation`."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, set[bytes]] = {}
        self._incoming: dict[int, set[bytes]] = {}

    def stored(self, tier: int, hashes: list[bytes]) -> None:
        self.held.setdefault(tier, set()).update(hashes)

    def removed(self, tier: int, hashes: list[bytes]) -> None:
        self.held.get(tier, set()).difference_update(hashes)

    def in_snapshot(self, tier: int, hashes: list[bytes]) -> None:
        self._incoming.setdefault(tier, set()).update(hashes)

    def end_snapshot(self, *, complete: bool) -> None:
        if complete:
            self.held = self._incoming
        self._incoming = {}

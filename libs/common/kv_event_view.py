"""What a watcher of `WatchBlocks` knows of one node. Pure.

    view = BlockView()
    while True:
        async for response in stub.WatchBlocks(view.resume()):
            view.apply(response)          # EventMissed: open the call again, `resume` heals it

Between two calls the view is what it was: old, but of one moment.
"""

from __future__ import annotations

from libs.common.block_hash import unpack_hashes
from libs.common.errors import Unavailable
from slipstream.v1 import kv_events_pb2


class EventMissed(Unavailable):
    """A response does not continue what is known."""


class BlockView:
    """The hashes that a node holds, by tier, up to `sequence` of `incarnation`."""

    def __init__(self) -> None:
        self.incarnation = ""
        self.sequence = 0
        self.held: dict[int, set[bytes]] = {}
        self._incoming: dict[int, set[bytes]] | None = None

    def resume(self) -> kv_events_pb2.WatchBlocksRequest:
        """The request that goes on from here; half a snapshot is forgotten."""
        self._incoming = None
        return kv_events_pb2.WatchBlocksRequest(incarnation=self.incarnation, after_sequence=self.sequence)

    def apply(self, response: kv_events_pb2.WatchBlocksResponse) -> None:
        """Take in the next response of a call. Raises EventMissed, and ValueError for broken hashes."""
        event = response.WhichOneof("event")
        if event == "snapshot":
            self._apply_piece(response)
            return
        if (
            self._incoming is not None
            or response.incarnation != self.incarnation
            or response.sequence != self.sequence + 1
        ):
            raise EventMissed(f"change {response.sequence} does not follow {self.sequence}")
        self.sequence = response.sequence
        if event == "stored":
            hashes = unpack_hashes(response.stored.block_hashes)
            self.held.setdefault(response.stored.tier, set()).update(hashes)
        elif event == "removed":
            hashes = unpack_hashes(response.removed.block_hashes)
            self.held.get(response.removed.tier, set()).difference_update(hashes)

    def _apply_piece(self, response: kv_events_pb2.WatchBlocksResponse) -> None:
        incoming = self._incoming if self._incoming is not None else {}
        for piece in response.snapshot.held:
            incoming.setdefault(piece.tier, set()).update(unpack_hashes(piece.block_hashes))
        self._incoming = incoming
        if response.snapshot.last:
            self.incarnation, self.sequence = response.incarnation, response.sequence
            self.held, self._incoming = incoming, None

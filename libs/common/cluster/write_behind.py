"""The bookkeeping of placements that are written to etcd later, by compare-and-swap. Pure.

Many changes of one session become one write. Each change remembers the epoch it was based on; if
another router recorded something else since, theirs stands, and ours is dropped and counted.

    put(s, p)            get(s) = p; s is dirty, based on the epoch known now
    put(s, q)            get(s) = q; still one write to make
    take(n)              up to n dirty sessions, longest waiting first; placement.epoch = base; in flight
    written(s, e)        recorded at epoch e; a change made meanwhile is now based on e
    refused(s, r)        etcd holds r. r is ours: an earlier answer was lost, as if written.
                         r is None: expired; dirty again, based on nothing. Else: conflict, r stands
    returned(s)          not tried; dirty again
    unknown(s)           no answer; dirty again, and r == this placement will be known as ours
    observed(s, r)       etcd said so by itself; as refused, for sessions that are not in flight
"""

from __future__ import annotations

from collections.abc import Mapping

from libs.common.cluster.placement_record import UNRECORDED, Placement, SessionId

# Different values of one session whose fate is unknown; more than a few takes a long outage.
_MAX_UNKNOWN = 8


class PlacementWriteBehind:
    """What is recorded, and over it our own changes on their way."""

    def __init__(self, *, max_dirty: int) -> None:
        self._max_dirty = max_dirty
        self._recorded: dict[SessionId, Placement] = {}
        self._dirty: dict[SessionId, Placement] = {}
        self._in_flight: dict[SessionId, Placement] = {}
        self._unknown: dict[SessionId, tuple[Placement, ...]] = {}
        self.conflicts = 0
        self.dropped = 0

    @property
    def pending(self) -> int:
        """Sessions with a change that etcd may not hold yet."""
        return len(self._dirty.keys() | self._in_flight.keys())

    def get(self, session: SessionId) -> Placement | None:
        """The newest placement known, ours first; its epoch is that of the last record."""
        recorded = self._recorded.get(session)
        mine = self._dirty.get(session) or self._in_flight.get(session)
        if mine is None:
            return recorded
        return mine.at_epoch(recorded.epoch if recorded else UNRECORDED)

    def all(self) -> dict[SessionId, Placement]:
        """All placements known."""
        sessions = self._recorded.keys() | self._in_flight.keys() | self._dirty.keys()
        return {session: placement for session in sessions if (placement := self.get(session))}

    def put(self, session: SessionId, placement: Placement) -> None:
        """Change a placement. Beyond `max_dirty` sessions the longest waiting change is dropped."""
        known = self._dirty.get(session) or self._in_flight.get(session) or self._recorded.get(session)
        if session not in self._dirty and len(self._dirty) >= self._max_dirty:
            oldest = next(iter(self._dirty))
            del self._dirty[oldest]
            self._unknown.pop(oldest, None)
            self.dropped += 1
        self._dirty[session] = placement.at_epoch(known.epoch if known else UNRECORDED)

    def take(self, limit: int) -> list[tuple[SessionId, Placement]]:
        """Up to `limit` changes to write now, at most one of each session at any time."""
        sessions = [session for session in self._dirty if session not in self._in_flight][:limit]
        for session in sessions:
            self._in_flight[session] = self._dirty.pop(session)
        return [(session, self._in_flight[session]) for session in sessions]

    def written(self, session: SessionId, epoch: int) -> None:
        """What was in flight is recorded at `epoch`."""
        placement = self._in_flight.pop(session)
        self._accept(session, placement.at_epoch(epoch))

    def refused(self, session: SessionId, current: Placement | None) -> None:
        """What was in flight lost its comparison with `current` (None: there is no record)."""
        placement = self._in_flight.pop(session)
        if current is None:
            self._forget(session)
            self._dirty.setdefault(session, placement.at_epoch(UNRECORDED))
        elif placement.same_place(current):
            self._accept(session, current)
        elif self._is_ours(session, current):
            self._accept(session, current)
            self._dirty.setdefault(session, placement.at_epoch(current.epoch))
        else:
            self._yield_to(session, current, was_in_flight=True)

    def returned(self, session: SessionId) -> None:
        """What was in flight was not tried."""
        placement = self._in_flight.pop(session)
        # In front of the others: it has waited longest. A change made meanwhile supersedes it.
        self._dirty = {session: self._dirty.get(session, placement), **self._dirty}

    def unknown(self, session: SessionId) -> None:
        """What was in flight may or may not have been recorded."""
        placement = self._in_flight[session]
        if not self._is_ours(session, placement):
            self._unknown[session] = (*self._unknown.get(session, ()), placement)[-_MAX_UNKNOWN:]
        self.returned(session)

    def claimed(self, session: SessionId, placement: Placement) -> None:
        """We recorded `placement` at its epoch by a write of its own; waiting changes are void."""
        self._dirty.pop(session, None)
        self._accept(session, placement)

    def observed(self, session: SessionId, placement: Placement | None) -> None:
        """A record seen in etcd; None: it expired."""
        if placement is None:
            self._forget(session)
            return
        known = self._recorded.get(session)
        if known is not None and placement.epoch <= known.epoch:
            return
        if session in self._in_flight:
            # The answer to our own write decides; it may be this very record.
            self._record(session, placement)
        elif session not in self._dirty or self._is_ours(session, placement):
            self._accept(session, placement)
        else:
            self._yield_to(session, placement, was_in_flight=False)

    def observed_all(self, placements: Mapping[SessionId, Placement]) -> None:
        """All that etcd holds, after a gap: what is not in it has expired."""
        for session in self._recorded.keys() - placements.keys():
            self.observed(session, None)
        for session, placement in placements.items():
            self.observed(session, placement)

    def _accept(self, session: SessionId, placement: Placement) -> None:
        """A record of ours, or one that contradicts nothing: later changes are based on it."""
        self._record(session, placement)
        self._unknown.pop(session, None)
        if session in self._dirty:
            self._dirty[session] = self._dirty[session].at_epoch(placement.epoch)

    def _yield_to(self, session: SessionId, theirs: Placement, *, was_in_flight: bool) -> None:
        if self._dirty.pop(session, None) is not None or was_in_flight:
            self.conflicts += 1
        self._unknown.pop(session, None)
        self._record(session, theirs)

    def _forget(self, session: SessionId) -> None:
        self._recorded.pop(session, None)
        if session in self._dirty:
            self._dirty[session] = self._dirty[session].at_epoch(UNRECORDED)

    def _is_ours(self, session: SessionId, placement: Placement) -> bool:
        return any(placement.same_place(ours) for ours in self._unknown.get(session, ()))

    def _record(self, session: SessionId, placement: Placement) -> None:
        known = self._recorded.get(session)
        if known is None or placement.epoch > known.epoch:
            self._recorded[session] = placement

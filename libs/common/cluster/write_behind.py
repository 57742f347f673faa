"""The state of placements that are written to etcd later, by compare-and-swap. Pure.

Several changes of one session become one write, and a session is written at most once in `write_interval_s`.
Each change has a base epoch; if another router has recorded a change since, that one wins, and ours is
dropped and counted.

    put(s, p)            get(s) = p; s is dirty, with the epoch known now as the base
    put(s, q)            get(s) = q; still one write
    start_writes(n)      up to n dirty sessions that are due, longest waiting first; placement.epoch = base;
                         in flight
    confirm(s, e)        recorded at epoch e, which is the base of a change made meanwhile
    reject(s, r)         etcd has r. If r is ours, an earlier response was lost: as `confirm`.
                         If r is None, it expired: dirty again, without a base. Else: a conflict, r wins
    requeue(s)           the write was not tried; dirty again
    mark_unknown(s)      no response; dirty again, and a record equal to this placement counts as ours
    observe(s, r)        a record seen by the watch; as `reject`, for sessions that are not in flight
    expire(s, r)         r is not in etcd any more; nothing, if another record is known meanwhile
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from libs.common.cluster.placement_record import UNRECORDED, Placement, SessionId
from libs.common.cluster.tenant_sessions import TenantSessions
from libs.common.service_bounds import MAX_TENANT_SESSIONS

# Placements of one session with unknown outcomes; only a long outage makes more than a few.
_MAX_UNKNOWN = 8


class PlacementWriteBehind:
    """The recorded placements, and this router's changes that are not recorded yet."""

    def __init__(
        self,
        *,
        max_dirty: int,
        max_tenant_sessions: int = MAX_TENANT_SESSIONS,
        write_interval_s: float = 0.0,
    ) -> None:
        """`max_tenant_sessions`: the most sessions of one tenant; it begins no more."""
        self._max_dirty = max_dirty
        self._max_tenant_sessions = max_tenant_sessions
        self.names = TenantSessions()  # all sessions that are recorded, dirty or in flight
        self._write_interval_s = write_interval_s
        # To find its first item, a dict walks over all that were removed before it; an OrderedDict does not.
        self._written_s: OrderedDict[SessionId, float] = OrderedDict()  # of the last interval, earliest first
        self._recorded: dict[SessionId, Placement] = {}
        self._dirty: OrderedDict[SessionId, Placement] = OrderedDict()
        self._in_flight: dict[SessionId, Placement] = {}
        self._unknown: dict[SessionId, tuple[Placement, ...]] = {}
        self.conflicts = 0
        self.dropped = 0

    @property
    def pending(self) -> int:
        """The number of sessions with a change that may not be recorded yet."""
        return len(self._dirty) + sum([session not in self._dirty for session in self._in_flight])

    def get(self, session: SessionId) -> Placement | None:
        """The newest placement, unrecorded ones included, with the epoch of the last record."""
        recorded = self._recorded.get(session)
        mine = self._dirty.get(session) or self._in_flight.get(session)
        if mine is None:
            return recorded
        return mine.at_epoch(recorded.epoch if recorded else UNRECORDED)

    def all(self) -> dict[SessionId, Placement]:
        """The newest placement of each session."""
        sessions = self._recorded.keys() | self._in_flight.keys() | self._dirty.keys()
        return {session: placement for session in sessions if (placement := self.get(session))}

    def put(self, session: SessionId, placement: Placement) -> None:
        """Change a placement. Beyond `max_dirty` sessions, drops the change that has waited longest.

        A new session of a tenant that has too many is dropped.
        """
        known = self._dirty.get(session) or self._in_flight.get(session) or self._recorded.get(session)
        if known is None and self.names.count(session.tenant) >= self._max_tenant_sessions:
            self.dropped += 1
            return
        if session not in self._dirty and len(self._dirty) >= self._max_dirty:
            oldest = next(iter(self._dirty))
            del self._dirty[oldest]
            self._unknown.pop(oldest, None)
            self.dropped += 1
            self._count(oldest)
        self._dirty[session] = placement.at_epoch(known.epoch if known else UNRECORDED)
        self._count(session)

    def start_writes(self, limit: int, *, now_s: float) -> list[tuple[SessionId, Placement]]:
        """Up to `limit` changes to write now; at any time at most one of each session is in flight."""
        while self._written_s:
            earliest = next(iter(self._written_s))
            if now_s - self._written_s[earliest] < self._write_interval_s:
                break
            del self._written_s[earliest]
        due = (s for s in self._dirty if s not in self._in_flight and s not in self._written_s)
        sessions = list(islice(due, limit))
        for session in sessions:
            self._in_flight[session] = self._dirty.pop(session)
            self._written_s[session] = now_s
        return [(session, self._in_flight[session]) for session in sessions]

    def confirm(self, session: SessionId, epoch: int) -> None:
        """The write in flight was recorded at `epoch`."""
        placement = self._in_flight.pop(session)
        self._accept(session, placement.at_epoch(epoch))

    def reject(self, session: SessionId, current: Placement | None) -> None:
        """The write in flight failed its comparison with `current` (None: there is no record)."""
        placement = self._in_flight.pop(session)
        self._written_s.pop(session, None)
        if current is None:
            self._remove(session)
            self._dirty.setdefault(session, placement.at_epoch(UNRECORDED))
            self._count(session)
        elif placement.same_place(current):
            self._accept(session, current)
        elif self._is_ours(session, current):
            self._accept(session, current)
            self._dirty.setdefault(session, placement.at_epoch(current.epoch))
        else:
            self._yield_to(session, current, was_in_flight=True)

    def requeue(self, session: SessionId) -> None:
        """The write in flight was not tried."""
        self._written_s.pop(session, None)
        self._retry(session)

    def mark_unknown(self, session: SessionId) -> None:
        """The write in flight may or may not have been recorded."""
        placement = self._in_flight[session]
        if not self._is_ours(session, placement):
            self._unknown[session] = (*self._unknown.get(session, ()), placement)[-_MAX_UNKNOWN:]
        self._retry(session)

    def observe(self, session: SessionId, placement: Placement | None) -> None:
        """Apply a record seen in etcd; None: it expired."""
        if placement is None:
            self._remove(session)
            return
        known = self._recorded.get(session)
        if known is not None and placement.epoch <= known.epoch:
            return
        if session in self._in_flight:
            # The response to the write in flight decides; this may be its record.
            self._record(session, placement)
        elif session not in self._dirty or self._is_ours(session, placement):
            self._accept(session, placement)
        else:
            self._yield_to(session, placement, was_in_flight=False)

    def records(self) -> list[tuple[SessionId, Placement]]:
        """The records that are known now."""
        return list(self._recorded.items())

    def expire(self, session: SessionId, record: Placement) -> None:
        """Apply that this record has expired, unless a newer one was seen or written meanwhile."""
        if self._recorded.get(session) is record:
            self.observe(session, None)

    def _retry(self, session: SessionId) -> None:
        """Make the write in flight dirty again."""
        placement = self._in_flight.pop(session)
        # In front, as it has waited longest. A change made meanwhile supersedes it.
        self._dirty.setdefault(session, placement)
        self._dirty.move_to_end(session, last=False)

    def _accept(self, session: SessionId, placement: Placement) -> None:
        """Record a placement that is ours or contradicts no change; it is the base of later changes."""
        self._record(session, placement)
        self._unknown.pop(session, None)
        if session in self._dirty:
            self._dirty[session] = self._dirty[session].at_epoch(placement.epoch)

    def _yield_to(self, session: SessionId, theirs: Placement, *, was_in_flight: bool) -> None:
        if self._dirty.pop(session, None) is not None or was_in_flight:
            self.conflicts += 1
        self._unknown.pop(session, None)
        self._record(session, theirs)

    def _remove(self, session: SessionId) -> None:
        self._recorded.pop(session, None)
        if session in self._dirty:
            self._dirty[session] = self._dirty[session].at_epoch(UNRECORDED)
        self._count(session)

    def _is_ours(self, session: SessionId, placement: Placement) -> bool:
        return any(placement.same_place(ours) for ours in self._unknown.get(session, ()))

    def _record(self, session: SessionId, placement: Placement) -> None:
        known = self._recorded.get(session)
        if known is None or placement.epoch > known.epoch:
            self._recorded[session] = placement
            self._count(session)

    def _count(self, session: SessionId) -> None:
        """Count the session as one of its tenant, as long as anything of it is here."""
        if session in self._recorded or session in self._dirty or session in self._in_flight:
            self.names.add(session)
        else:
            self.names.discard(session)

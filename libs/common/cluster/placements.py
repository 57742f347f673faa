"""The placement of each session's KV, shared by all routers through etcd.

    placements = EtcdPlacements(client)
    await placements.start()
    placements.get(session)                    # from memory; requests never wait for etcd
    placements.put(session, placement)         # seen by `get` at once, by other routers a moment later
    await placements.claim(session, placement, expected_epoch=seen.epoch)   # now, or StaleEpoch

Each router watches the prefix of the records, so it knows all placements, even after a restart. Changes are
coalesced and written in batches by compare-and-swap on the epoch; see write_behind.py. Records expire some
time after their last change, through leases that all records of a few minutes share.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Protocol

from libs.common.cluster.placement_record import (
    SESSIONS_PREFIX,
    Placement,
    SessionId,
    decode_placement,
    encode_placement,
)
from libs.common.cluster.write_behind import PlacementWriteBehind
from libs.common.etcd.client import MAX_SWAPS, EtcdClient
from libs.common.etcd.messages import KeyValue, LeaseNotFound, PrefixSnapshot, PrefixUpdate, Swap
from libs.common.etcd.watch import watch_prefix
from libs.common.service_bounds import MAX_LOCAL_SESSIONS
from slipstream.errors import DeadlineExceeded, FailedPrecondition, SlipstreamError

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.2
SESSION_TTL_S = 3600
LEASE_WINDOW_S = 300
MAX_DIRTY = 100_000
_RETRY_S = 0.5


class StaleEpoch(FailedPrecondition):
    """Another router has changed the placement to `current` (None: it expired)."""

    def __init__(self, session: SessionId, current: Placement | None) -> None:
        super().__init__(f"the placement of session {session.session!r} was changed by another router")
        self.current = current


class Placements(Protocol):
    """The placements of sessions. Methods in order of use."""

    def get(self, session: SessionId) -> Placement | None:
        """The newest known placement; None: the session can start anywhere."""

    def put(self, session: SessionId, placement: Placement) -> None:
        """Change the placement. Other routers see it after a short delay. Ignores `placement.epoch`."""

    async def claim(self, session: SessionId, placement: Placement, *, expected_epoch: int) -> Placement:
        """Change the placement now if its epoch still is `expected_epoch` (0: there is none).

        Returns it with the new epoch. Raises StaleEpoch, or Unavailable without a response of etcd; then the
        change may or may not have happened.
        """

    def all(self) -> Mapping[SessionId, Placement]:
        """All known placements."""

    async def flush(self, *, timeout_s: float) -> None:
        """Return when all changes are recorded. Raises DeadlineExceeded."""

    async def close(self) -> None:
        """Record as many changes as possible within a second, then stop."""


class EtcdPlacements:
    """Placements in etcd. Does not close the client."""

    def __init__(
        self,
        client: EtcdClient,
        *,
        flush_interval_s: float = FLUSH_INTERVAL_S,
        session_ttl_s: int = SESSION_TTL_S,
        lease_window_s: int = LEASE_WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A record expires `session_ttl_s` to `session_ttl_s + lease_window_s` after its last change."""
        self._client = client
        self._flush_interval_s = flush_interval_s
        self._leases = _WindowLeases(client, session_ttl_s, lease_window_s, clock)
        self._state = PlacementWriteBehind(max_dirty=MAX_DIRTY)
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loaded = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, *, timeout_s: float = 1.0) -> None:
        """Load the recorded placements. Without etcd, starts empty after `timeout_s` and loads them later."""
        self._tasks = [
            asyncio.create_task(self._follow(), name="placements-watch"),
            asyncio.create_task(self._write_dirty(), name="placements-write"),
        ]
        try:
            async with asyncio.timeout(timeout_s):
                await self._loaded.wait()
        except TimeoutError:
            log.warning("placements are not loaded yet: etcd does not respond")

    @property
    def conflicts(self) -> int:
        """How many changes were dropped because another router had recorded one before."""
        return self._state.conflicts

    def get(self, session: SessionId) -> Placement | None:
        return self._state.get(session)

    def all(self) -> Mapping[SessionId, Placement]:
        return self._state.all()

    def put(self, session: SessionId, placement: Placement) -> None:
        self._state.put(session, placement)
        self._idle.clear()
        self._changed.set()

    async def claim(self, session: SessionId, placement: Placement, *, expected_epoch: int) -> Placement:
        swap = Swap(session.key, encode_placement(placement), expected_epoch, await self._leases.current())
        try:
            outcome = await self._client.swap([swap])
        except LeaseNotFound:
            self._leases.drop()
            lease_id = await self._leases.current()
            outcome = await self._client.swap(
                [Swap(session.key, encode_placement(placement), expected_epoch, lease_id)]
            )
        if outcome.succeeded:
            claimed = placement.at_epoch(outcome.revision)
            self._state.record_claim(session, claimed)
            return claimed
        current = _read(outcome.current[0])
        self._state.observe(session, current)
        raise StaleEpoch(session, current)

    async def flush(self, *, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{self._state.pending} placements are not recorded yet") from None

    async def close(self) -> None:
        if self._tasks:
            try:
                await self.flush(timeout_s=1.0)
            except DeadlineExceeded as error:
                log.warning("closing: %s", error)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self) -> None:
        async with aclosing(watch_prefix(self._client, SESSIONS_PREFIX)) as updates:
            async for update in updates:
                _observe(self._state, update)
                self._loaded.set()

    async def _write_dirty(self) -> None:
        failing = False
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._flush_interval_s)
            self._changed.clear()
            while changes := self._state.start_writes(MAX_SWAPS):
                try:
                    await self._write(changes)
                    failing = False
                except Exception as error:
                    # The changes wait for the next attempt, so that other routers receive them in the end.
                    if not failing:
                        is_unexpected = not isinstance(error, SlipstreamError)
                        log.warning("placements are not recorded: %s", error, exc_info=is_unexpected)
                    failing = True
                    await asyncio.sleep(_RETRY_S)
            if not self._state.pending:
                self._idle.set()

    async def _write(self, changes: list[tuple[SessionId, Placement]]) -> None:
        """Write in one transaction. If some comparisons fail, the other changes join the next transaction."""
        open_changes = [session for session, _ in changes]
        try:
            lease_id = await self._leases.current()
            outcome = await self._client.swap(
                [Swap(s.key, encode_placement(p), p.epoch, lease_id) for s, p in changes]
            )
            for index, (session, placement) in enumerate(changes):
                open_changes.remove(session)
                if outcome.succeeded:
                    self._state.confirm(session, outcome.revision)
                elif _revision(outcome.current[index]) == placement.epoch:
                    self._state.requeue(session)
                else:
                    self._state.reject(session, _read(outcome.current[index]))
        except LeaseNotFound:
            self._leases.drop()
            raise
        finally:
            for session in open_changes:
                self._state.mark_unknown(session)


class _WindowLeases:
    """One lease for all records changed within a time window. It is never renewed."""

    def __init__(
        self, client: EtcdClient, record_ttl_s: int, window_s: int, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._ttl_s = record_ttl_s + window_s
        self._window_s = window_s
        self._clock = clock
        self._lease_id = 0
        self._until_s = 0.0
        self._lock = asyncio.Lock()

    async def current(self) -> int:
        """The lease for a record changed now."""
        async with self._lock:
            if self._clock() >= self._until_s:
                begin_s = self._clock()
                self._lease_id = (await self._client.grant_lease(self._ttl_s)).lease_id
                self._until_s = begin_s + self._window_s
            return self._lease_id

    def drop(self) -> None:
        """Drop the current lease, which etcd has lost; the next record gets a new one."""
        self._until_s = 0.0


class InMemoryPlacements:
    """The placements of a router without etcd, which no other process sees.

    They do not expire; beyond `max_sessions` the least recently used are evicted. Routers in one process that
    share an instance share their placements.
    """

    def __init__(self, *, max_sessions: int = MAX_LOCAL_SESSIONS) -> None:
        self._placements: OrderedDict[SessionId, Placement] = OrderedDict()
        self._max_sessions = max_sessions
        self._revision = 0

    def get(self, session: SessionId) -> Placement | None:
        placement = self._placements.get(session)
        if placement is not None:
            self._placements.move_to_end(session)
        return placement

    def put(self, session: SessionId, placement: Placement) -> None:
        self._revision += 1
        self._placements[session] = placement.at_epoch(self._revision)
        self._placements.move_to_end(session)
        if len(self._placements) > self._max_sessions:
            self._placements.popitem(last=False)

    async def claim(self, session: SessionId, placement: Placement, *, expected_epoch: int) -> Placement:
        current = self._placements.get(session)
        if (current.epoch if current else 0) != expected_epoch:
            raise StaleEpoch(session, current)
        self.put(session, placement)
        return self._placements[session]

    def all(self) -> Mapping[SessionId, Placement]:
        return dict(self._placements)

    async def flush(self, *, timeout_s: float) -> None:
        return

    async def close(self) -> None:
        return


def _observe(state: PlacementWriteBehind, update: PrefixUpdate) -> None:
    entries = update.entries.items() if isinstance(update, PrefixSnapshot) else update.changes
    observed: list[tuple[SessionId, Placement | None]] = []
    for key, entry in entries:
        try:
            observed.append((SessionId.from_key(key), _read(entry)))
        except ValueError as error:
            log.warning("ignoring a placement: %s", error)
    if isinstance(update, PrefixSnapshot):
        state.observe_all({session: placement for session, placement in observed if placement is not None})
    else:
        for session, placement in observed:
            state.observe(session, placement)


def _read(entry: KeyValue | None) -> Placement | None:
    if entry is None:
        return None
    try:
        return decode_placement(entry.value, epoch=entry.mod_revision)
    except ValueError as error:
        # Another version wrote it. An empty placement with its epoch prevents an overwrite.
        log.warning("ignoring the placement %s: %s", entry.key, error)
        return Placement(epoch=entry.mod_revision)


def _revision(entry: KeyValue | None) -> int:
    return entry.mod_revision if entry else 0

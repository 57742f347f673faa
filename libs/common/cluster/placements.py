"""The placement of each session's KV, shared by all routers through etcd.

    placements = EtcdPlacements(client)
    await placements.start()
    placements.get(session)                    # from memory; requests never wait for etcd
    placements.put(session, placement)         # seen by `get` at once, by other routers a moment later

A placement is a hint of where KV is, and claims nothing. Two routers may run requests of a session at the
same time, and the later record counts (ADR 0006).

Each router watches the prefix of the records, so it knows all placements, even after a restart. Changes are
coalesced and written in batches by compare-and-swap on the epoch, each session at most once a second; see
write_behind.py. Records expire some time after their last change, through leases that all records of a few
minutes share.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Protocol, TypeVar

from libs.common.cluster.placement_record import (
    SESSIONS_PREFIX,
    Placement,
    SessionId,
    decode_placement,
    encode_placement,
)
from libs.common.cluster.tenant_sessions import TenantSessions
from libs.common.cluster.write_behind import PlacementWriteBehind
from libs.common.etcd.client import MAX_SWAPS, EtcdClient
from libs.common.etcd.messages import KeyValue, LeaseNotFound, PrefixSnapshot, PrefixUpdate, Swap
from libs.common.etcd.watch import watch_prefix
from libs.common.service_bounds import MAX_LOCAL_SESSIONS
from libs.common.telemetry.paced_warnings import PacedWarnings
from slipstream.errors import DeadlineExceeded, SlipstreamError

T = TypeVar("T")
log = logging.getLogger(__name__)
_warnings = PacedWarnings(log)  # of records that other processes wrote

FLUSH_INTERVAL_S = 0.2
SESSION_TTL_S = 3600
MAX_LEASE_WINDOW_S = 300
WRITE_INTERVAL_S = 1.0
MAX_DIRTY = 100_000
_RETRY_S = 0.5
_CLOSE_S = 2.0
_PIECE = 256  # records that are read, or expire, in one iteration of the event loop: some milliseconds


class Placements(Protocol):
    """The placements of sessions. Methods in order of use."""

    def get(self, session: SessionId) -> Placement | None:
        """The newest known placement; None: the session can start anywhere."""

    def put(self, session: SessionId, placement: Placement) -> None:
        """Change the placement. Other routers see it after a short delay. Ignores `placement.epoch`."""

    def peek(self, session: SessionId) -> Placement | None:
        """Read like `get`, without a use that eviction counts."""

    def sessions_of(self, tenant: str) -> list[SessionId]:
        """The names of the tenant's known sessions, in no particular order."""

    def tenants(self) -> list[str]:
        """The tenants that have known sessions, in no particular order."""

    def all(self) -> Mapping[SessionId, Placement]:
        """All known placements. It takes a tenth of a second for 100,000: keep it off the event loop."""

    def figures(self) -> Mapping[str, float]:
        """The metrics of placements."""

    async def flush(self, *, timeout_s: float) -> None:
        """Return when all changes are recorded. Raises DeadlineExceeded."""

    async def close(self) -> None:
        """Record as many changes as possible within two seconds, then stop."""


class EtcdPlacements:
    """Placements in etcd. Does not close the client."""

    def __init__(
        self,
        client: EtcdClient,
        *,
        flush_interval_s: float = FLUSH_INTERVAL_S,
        session_ttl_s: int = SESSION_TTL_S,
        write_interval_s: float = WRITE_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A record expires `session_ttl_s` after its last change, or up to a quarter later."""
        self._client = client
        self._flush_interval_s = flush_interval_s
        self._clock = clock
        self._leases = _WindowLeases(client, session_ttl_s, clock)
        self._state = PlacementWriteBehind(max_dirty=MAX_DIRTY, write_interval_s=write_interval_s)
        self._n_written = 0
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

    def get(self, session: SessionId) -> Placement | None:
        return self._state.get(session)

    def peek(self, session: SessionId) -> Placement | None:
        return self._state.get(session)

    def sessions_of(self, tenant: str) -> list[SessionId]:
        return self._state.names.of(tenant)

    def tenants(self) -> list[str]:
        return self._state.names.tenants()

    def all(self) -> Mapping[SessionId, Placement]:
        return self._state.all()

    def figures(self) -> Mapping[str, float]:
        return {
            "slipstream_session_writes_total": self._n_written,
            "slipstream_session_conflicts_total": self._state.conflicts,
            "slipstream_session_writes_dropped_total": self._state.dropped,
        }

    def put(self, session: SessionId, placement: Placement) -> None:
        self._state.put(session, placement)
        self._idle.clear()
        self._changed.set()

    async def flush(self, *, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{self._state.pending} placements are not recorded yet") from None

    async def close(self) -> None:
        if self._tasks:
            try:
                await self.flush(timeout_s=_CLOSE_S)
            except DeadlineExceeded as error:
                log.warning("closing: %s", error)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self) -> None:
        async with aclosing(watch_prefix(self._client, SESSIONS_PREFIX)) as updates:
            async for update in updates:
                await _observe(self._state, update)
                self._loaded.set()

    async def _write_dirty(self) -> None:
        failing = False
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._flush_interval_s)
            self._changed.clear()
            while changes := self._state.start_writes(MAX_SWAPS, now_s=self._clock()):
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
            if self._state.pending:  # sessions that were written less than a second ago
                self._changed.set()
            else:
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
                    self._n_written += 1
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

    def __init__(self, client: EtcdClient, record_ttl_s: int, clock: Callable[[], float]) -> None:
        self._client = client
        self._window_s = min(MAX_LEASE_WINDOW_S, max(1, record_ttl_s // 4))
        self._ttl_s = record_ttl_s + self._window_s
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
        self._names = TenantSessions()
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
        self._names.add(session)
        if len(self._placements) > self._max_sessions:
            evicted, _ = self._placements.popitem(last=False)
            self._names.discard(evicted)

    def peek(self, session: SessionId) -> Placement | None:
        return self._placements.get(session)

    def sessions_of(self, tenant: str) -> list[SessionId]:
        return self._names.of(tenant)

    def tenants(self) -> list[str]:
        return self._names.tenants()

    def all(self) -> Mapping[SessionId, Placement]:
        return dict(self._placements)

    def figures(self) -> Mapping[str, float]:
        return {}

    async def flush(self, *, timeout_s: float) -> None:
        return

    async def close(self) -> None:
        return


async def _observe(state: PlacementWriteBehind, update: PrefixUpdate) -> None:
    """Apply an update. A snapshot may have 100,000s of records; streams go on between two pieces of it."""
    is_whole = isinstance(update, PrefixSnapshot)
    before, seen = state.records() if is_whole else [], set[SessionId]()
    entries = update.entries.items() if isinstance(update, PrefixSnapshot) else update.changes
    async for key, entry in _in_pieces(entries):
        try:
            session, placement = SessionId.from_key(key), _read(entry)
        except ValueError as error:
            _warnings.warn("key", f"ignoring a placement: {error}")
            continue
        seen.add(session)
        state.observe(session, placement)
    async for session, record in _in_pieces(before):
        if session not in seen:
            state.expire(session, record)


async def _in_pieces(items: Iterable[T]) -> AsyncIterator[T]:
    for n, item in enumerate(items, start=1):
        yield item
        if n % _PIECE == 0:
            await asyncio.sleep(0)


def _read(entry: KeyValue | None) -> Placement | None:
    if entry is None:
        return None
    try:
        return decode_placement(entry.value, epoch=entry.mod_revision)
    except ValueError as error:
        # Another version wrote it. An empty placement with its epoch prevents an overwrite.
        _warnings.warn("value", f"ignoring the placement {entry.key}: {error}")
        return Placement(epoch=entry.mod_revision)


def _revision(entry: KeyValue | None) -> int:
    return entry.mod_revision if entry else 0

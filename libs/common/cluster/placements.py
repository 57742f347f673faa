"""Where each session's KV lives, shared by all routers through etcd.

    placements = EtcdPlacements(client)
    await placements.start()
    placements.get(session)                    # from memory; a request never waits for etcd
    placements.put(session, placement)         # seen by `get` at once, by other routers a moment later
    await placements.claim(session, placement, expected_epoch=seen.epoch)   # now, or StaleEpoch

Routers watch the prefix, so that each knows all placements, also those of its predecessor. Changes are
coalesced and written in batches by compare-and-swap on the epoch; see write_behind.py. Records expire
some time after their last change, through leases shared by all records of a few minutes.
"""

from __future__ import annotations

import asyncio
import logging
import time
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
from slipstream.errors import DeadlineExceeded, FailedPrecondition, SlipstreamError

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.2
SESSION_TTL_S = 3600
LEASE_WINDOW_S = 300
MAX_DIRTY = 100_000
_RETRY_S = 0.5


class StaleEpoch(FailedPrecondition):
    """Another router changed the placement since; `current` is what it is now (None: it expired)."""

    def __init__(self, session: SessionId, current: Placement | None) -> None:
        super().__init__(f"the placement of session {session.session!r} was changed by another router")
        self.current = current


class Placements(Protocol):
    """What a router knows of its sessions. In order of use."""

    def get(self, session: SessionId) -> Placement | None:
        """The placement as far as known here; None: start anywhere."""

    def put(self, session: SessionId, placement: Placement) -> None:
        """Change the placement, for others with a short delay. `placement.epoch` is ignored."""

    async def claim(self, session: SessionId, placement: Placement, *, expected_epoch: int) -> Placement:
        """Change the placement now if its epoch still is `expected_epoch` (0: there is none).

        Returns it with the new epoch. Raises `StaleEpoch`; `Unavailable` when etcd does not answer,
        and then the change may or may not have happened.
        """

    def all(self) -> Mapping[SessionId, Placement]:
        """Every placement known."""

    async def flush(self, *, timeout_s: float) -> None:
        """Return when all changes are recorded. `DeadlineExceeded` if that takes too long."""

    async def close(self) -> None:
        """Record what can be recorded in a second, then stop."""


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
        self._book = PlacementWriteBehind(max_dirty=MAX_DIRTY)
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loaded = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, *, timeout_s: float = 1.0) -> None:
        """Load what is recorded. Without etcd it starts empty after `timeout_s` and learns later."""
        self._tasks = [
            asyncio.create_task(self._follow(), name="placements-watch"),
            asyncio.create_task(self._write_dirty(), name="placements-write"),
        ]
        try:
            async with asyncio.timeout(timeout_s):
                await self._loaded.wait()
        except TimeoutError:
            log.warning("placements are not loaded yet: no answer from etcd")

    @property
    def conflicts(self) -> int:
        """Changes of ours that another router forestalled."""
        return self._book.conflicts

    def get(self, session: SessionId) -> Placement | None:
        return self._book.get(session)

    def all(self) -> Mapping[SessionId, Placement]:
        return self._book.all()

    def put(self, session: SessionId, placement: Placement) -> None:
        self._book.put(session, placement)
        self._idle.clear()
        self._changed.set()

    async def claim(self, session: SessionId, placement: Placement, *, expected_epoch: int) -> Placement:
        swap = Swap(session.key, encode_placement(placement), expected_epoch, await self._leases.current())
        try:
            outcome = await self._client.swap([swap])
        except LeaseNotFound:
            self._leases.forget()
            lease_id = await self._leases.current()
            outcome = await self._client.swap(
                [Swap(session.key, encode_placement(placement), expected_epoch, lease_id)]
            )
        if outcome.succeeded:
            claimed = placement.at_epoch(outcome.revision)
            self._book.claimed(session, claimed)
            return claimed
        current = _read(outcome.current[0])
        self._book.observed(session, current)
        raise StaleEpoch(session, current)

    async def flush(self, *, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"{self._book.pending} placements are not recorded yet") from None

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
                _observe(self._book, update)
                self._loaded.set()

    async def _write_dirty(self) -> None:
        failing = False
        while True:
            await self._changed.wait()
            await asyncio.sleep(self._flush_interval_s)
            self._changed.clear()
            while changes := self._book.take(MAX_SWAPS):
                try:
                    await self._write(changes)
                    failing = False
                except Exception as error:
                    # Giving up would leave the other routers blind; what is unwritten waits.
                    if not failing:
                        unforeseen = not isinstance(error, SlipstreamError)
                        log.warning("placements are not recorded: %s", error, exc_info=unforeseen)
                    failing = True
                    await asyncio.sleep(_RETRY_S)
            if not self._book.pending:
                self._idle.set()

    async def _write(self, changes: list[tuple[SessionId, Placement]]) -> None:
        """One transaction. Where some comparisons fail, the others are tried again with the next one."""
        open_changes = [session for session, _ in changes]
        try:
            lease_id = await self._leases.current()
            outcome = await self._client.swap(
                [Swap(s.key, encode_placement(p), p.epoch, lease_id) for s, p in changes]
            )
            for index, (session, placement) in enumerate(changes):
                open_changes.remove(session)
                if outcome.succeeded:
                    self._book.written(session, outcome.revision)
                elif _revision(outcome.current[index]) == placement.epoch:
                    self._book.returned(session)
                else:
                    self._book.refused(session, _read(outcome.current[index]))
        except LeaseNotFound:
            self._leases.forget()
            raise
        finally:
            for session in open_changes:
                self._book.unknown(session)


class _WindowLeases:
    """One lease for all records changed within a window of time; never renewed."""

    def __init__(
        self, client: EtcdClient, record_ttl_s: int, window_s: int, clock: Callable[[], float]
    ) -> None:
        self._client = client
        self._ttl_s = record_ttl_s + window_s
        self._window_s = window_s
        self._clock = clock
        self._lease_id = 0
        self._until = 0.0
        self._lock = asyncio.Lock()

    async def current(self) -> int:
        """The lease for a record changed now."""
        async with self._lock:
            if self._clock() >= self._until:
                asked_at = self._clock()
                self._lease_id = (await self._client.grant_lease(self._ttl_s)).lease_id
                self._until = asked_at + self._window_s
            return self._lease_id

    def forget(self) -> None:
        """The lease is gone (etcd lost it); take a new one next time."""
        self._until = 0.0


class InMemoryPlacements:
    """Placements within one process, for tests and the simulator; share one instance between routers."""

    def __init__(self) -> None:
        self._placements: dict[SessionId, Placement] = {}
        self._revision = 0

    def get(self, session: SessionId) -> Placement | None:
        return self._placements.get(session)

    def put(self, session: SessionId, placement: Placement) -> None:
        self._revision += 1
        self._placements[session] = placement.at_epoch(self._revision)

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


def _observe(book: PlacementWriteBehind, update: PrefixUpdate) -> None:
    entries = update.entries.items() if isinstance(update, PrefixSnapshot) else update.changes
    observed: list[tuple[SessionId, Placement | None]] = []
    for key, entry in entries:
        try:
            observed.append((SessionId.from_key(key), _read(entry)))
        except ValueError as error:
            log.warning("placement ignored: %s", error)
    if isinstance(update, PrefixSnapshot):
        book.observed_all({session: placement for session, placement in observed if placement is not None})
    else:
        for session, placement in observed:
            book.observed(session, placement)


def _read(entry: KeyValue | None) -> Placement | None:
    if entry is None:
        return None
    try:
        return decode_placement(entry.value, epoch=entry.mod_revision)
    except ValueError as error:
        # Another version wrote it. Nothing is known then; its epoch still guards against overwriting.
        log.warning("%s is ignored: %s", entry.key, error)
        return Placement(epoch=entry.mod_revision)


def _revision(entry: KeyValue | None) -> int:
    return entry.mod_revision if entry else 0

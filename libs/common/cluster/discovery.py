"""Discovery: workers announce themselves, routers watch the fleet.

    discovery = EtcdDiscovery(client)
    discovery.announce(Worker(Role.DECODE, "decode-0", "127.0.0.1:9000", new_incarnation()))

    async with Fleet(discovery) as fleet:
        await fleet.wait_until(lambda f: len(f.with_role(Role.DECODE)) == 2, timeout_s=10)
        fleet.current.with_role(Role.DECODE)        # an immutable snapshot; reading costs nothing

While etcd is unavailable the fleet keeps its last state. A worker that loses its lease announces itself again
as soon as it can.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Protocol

from libs.common.cluster.worker_record import (
    WORKERS_PREFIX,
    FleetSnapshot,
    FleetState,
    Worker,
    encode_worker,
    may_replace,
)
from libs.common.etcd.client import EtcdClient
from libs.common.etcd.lease import LeaseSession
from libs.common.etcd.messages import PrefixSnapshot, PrefixUpdate
from libs.common.etcd.watch import watch_prefix
from libs.common.telemetry.paced_warnings import PacedWarnings
from libs.common.worker_bounds import LEAVE_S
from slipstream.errors import DeadlineExceeded

log = logging.getLogger(__name__)

# Short enough to remove a dead worker soon, long enough for etcd to elect a new leader.
LEASE_TTL_S = 10
# The least time between two snapshots. One costs as much as the fleet is large, and its readers compare it. A
# change costs little, so many changes a second bring one snapshot.
SNAPSHOT_INTERVAL_S = 0.1
_SHOWN_CHARS = 256


class Discovery(Protocol):
    """How a process joins the fleet and watches it. Methods in order of use."""

    def announce(self, worker: Worker) -> None:
        """Add the worker to the fleet until it is withdrawn or this process ends. Returns at once.

        A second announcement of the same role and instance replaces the record.
        """

    async def wait_announced(self, *, timeout_s: float) -> None:
        """Return when others can see the announced workers. Raises DeadlineExceeded."""

    @property
    def term(self) -> int | None:
        """The number of this process's unbroken membership in the fleet; None while its lease may be lost."""

    @property
    def has_lost_lease(self) -> bool:
        """Whether this process announced itself, and etcd does not hold that on a living lease."""

    def watch(self) -> AsyncGenerator[FleetSnapshot, None]:
        """Yield the fleet now and after each change. Endless; the caller closes it."""

    async def withdraw(self, worker: Worker) -> None:
        """Remove the worker from the fleet: others stop using it at once, and see it as leaving."""

    async def close(self) -> None:
        """Withdraw all workers announced here."""


class EtcdDiscovery:
    """Discovery through etcd, with all records on this process's lease. Does not close the client."""

    def __init__(
        self,
        client: EtcdClient,
        *,
        ttl_s: int = LEASE_TTL_S,
        hold_s: float = LEASE_TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hold_s`: how long a worker stays in the fleet after its record expired without `leaving`."""
        self._client = client
        self._ttl_s = ttl_s
        self._hold_s = hold_s
        self._clock = clock
        self._announced: dict[str, Worker] = {}
        self._session: LeaseSession | None = None

    @property
    def displaced_keys(self) -> frozenset[str]:
        """Keys announced here that a later run of the same name has replaced; they stay replaced."""
        return self._session.displaced_keys if self._session else frozenset()

    @property
    def term(self) -> int | None:
        return self._session.term if self._session else None

    @property
    def has_lost_lease(self) -> bool:
        return self._session is not None and self._session.term is None

    def announce(self, worker: Worker) -> None:
        if self._session is None:
            self._session = LeaseSession(self._client, ttl_s=self._ttl_s, may_replace=may_replace)
        self._announced[worker.key] = worker
        self._session.set(worker.key, encode_worker(worker))

    async def wait_announced(self, *, timeout_s: float) -> None:
        if self._session is not None:
            await self._session.wait_synced(timeout_s=timeout_s)

    async def watch(self) -> AsyncGenerator[FleetSnapshot, None]:
        state, warnings = FleetState(hold_s=self._hold_s), PacedWarnings(log)
        async with aclosing(watch_prefix(self._client, WORKERS_PREFIX)) as updates:
            last: FleetSnapshot | None = None
            pending = asyncio.ensure_future(anext(updates))
            try:
                due_s = self._clock()
                while True:
                    expiry_s = state.next_expiry_s()
                    left_s = None if expiry_s is None else max(0.0, expiry_s - self._clock())
                    while True:
                        # `wait_for` would cancel, and so end, the watch at its timeout.
                        await asyncio.wait({pending}, timeout=left_s)
                        if pending.done():
                            _apply(state, pending.result(), warnings, now_s=self._clock())
                            pending = asyncio.ensure_future(anext(updates))
                        if (left_s := due_s - self._clock()) <= 0:
                            break
                    due_s = self._clock() + SNAPSHOT_INTERVAL_S
                    state.expire(now_s=self._clock())
                    if (snapshot := state.snapshot()) != last:
                        last = snapshot
                        yield snapshot
            finally:
                pending.cancel()
                await asyncio.gather(pending, return_exceptions=True)

    async def withdraw(self, worker: Worker) -> None:
        if self._session is None or self._announced.pop(worker.key, None) is None:
            return
        self._session.set(worker.key, encode_worker(worker, leaving=True))
        await self._wait_left()

    async def close(self) -> None:
        if self._session is None:
            return
        for worker in self._announced.values():
            self._session.set(worker.key, encode_worker(worker, leaving=True))
        if self._announced:
            self._announced.clear()
            await self._wait_left()
        await self._session.close()

    async def _wait_left(self) -> None:
        """Wait until etcd has the records with `leaving`, or for a short time-out."""
        try:
            await self.wait_announced(timeout_s=LEAVE_S)
        except DeadlineExceeded:
            log.warning("etcd is unavailable; this process stays in the fleet until its lease expires")


class InMemoryDiscovery:
    """Discovery within one process, for services without etcd. Instances that share `fleet` see each
    other."""

    def __init__(self, fleet: InMemoryFleet | None = None) -> None:
        self.fleet = fleet or InMemoryFleet()
        self._announced: set[str] = set()

    @property
    def term(self) -> int | None:
        return 1

    @property
    def has_lost_lease(self) -> bool:
        return False

    def announce(self, worker: Worker) -> None:
        self._announced.add(worker.key)
        self.fleet.leaving.pop(worker.key, None)
        self.fleet.workers[worker.key] = worker
        self.fleet.notify()

    async def wait_announced(self, *, timeout_s: float) -> None:
        return

    async def watch(self) -> AsyncGenerator[FleetSnapshot, None]:
        while True:
            changed = self.fleet.changed
            yield FleetSnapshot.of(self.fleet.workers.values(), leaving=self.fleet.leaving.values())
            await changed.wait()

    async def withdraw(self, worker: Worker) -> None:
        if worker.key in self.fleet.workers and worker.key in self._announced:
            self.fleet.leaving[worker.key] = self.fleet.workers.pop(worker.key)
            self.fleet.notify()

    async def close(self) -> None:
        for key in tuple(self._announced):
            self._announced.discard(key)
            self.fleet.workers.pop(key, None)
            self.fleet.leaving.pop(key, None)
            self.fleet.notify()


class InMemoryFleet:
    """The state that members of an in-memory discovery share."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.leaving: dict[str, Worker] = {}
        self.changed = asyncio.Event()

    def notify(self) -> None:
        """Wake all watchers."""
        self.changed.set()
        self.changed = asyncio.Event()


class Fleet:
    """Keeps the newest fleet snapshot, `current`, in a background task. It is empty until the first one."""

    def __init__(self, discovery: Discovery) -> None:
        self.current = FleetSnapshot()
        self._discovery = discovery
        self._changed = asyncio.Event()
        self._has_snapshot = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Fleet:
        self._task = asyncio.create_task(self._follow(), name="fleet")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def wait_snapshot(self) -> FleetSnapshot:
        """Return the newest snapshot once there is one. It may be empty."""
        await self._has_snapshot.wait()
        return self.current

    async def wait_changed(self, seen: FleetSnapshot) -> FleetSnapshot:
        """Return the newest snapshot once it differs from `seen`."""
        while self.current == seen:
            await self._changed.wait()
        return self.current

    async def wait_until(
        self, condition: Callable[[FleetSnapshot], bool], *, timeout_s: float
    ) -> FleetSnapshot:
        """Return the first snapshot that meets `condition`. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition(self.current):
                    await self._changed.wait()
                return self.current
        except TimeoutError:
            raise DeadlineExceeded(f"the fleet did not meet the condition within {timeout_s:g} s") from None

    async def _follow(self) -> None:
        async with aclosing(self._discovery.watch()) as snapshots:
            async for snapshot in snapshots:
                self.current = snapshot
                self._has_snapshot.set()
                self._changed.set()
                self._changed = asyncio.Event()


def _apply(state: FleetState, update: PrefixUpdate, warnings: PacedWarnings, *, now_s: float) -> None:
    changes: list[tuple[str, bytes | None]]
    if isinstance(update, PrefixSnapshot):
        changes = [(key, None) for key in state.known_keys() if key not in update.entries]
        changes += [(key, entry.value) for key, entry in update.entries.items()]
    else:
        changes = [(key, entry.value if entry else None) for key, entry in update.changes]
    for key, value in changes:
        if value is None:
            state.mark_suspect(key, now_s=now_s)
            continue
        try:
            state.put(key, value)
        except ValueError as error:
            shown = key[:_SHOWN_CHARS]
            warnings.warn(shown, f"ignoring the worker record {shown}: {error}")

"""Reads of pool values from their replicas, each verified; a bad or late replica fails over to the next.

Runs in the pool agent's process. A late read may land in memory that the next replica's read has filled.
The node therefore verifies its own copy once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Protocol

from services.kvstore.pool.agent.client_guard import Replica
from services.kvstore.pool.agent.node_readers import ValueRead
from services.kvstore.pool.agent.protocol import CORRUPT, MISSING, UNREACHABLE
from services.kvstore.pool.agent.staging import Extent, SharedMemory
from services.kvstore.pool.value import HEADER_BYTES, name_of, verify_value

# Bounds of one fetch and of one round of replica reads, whatever the nodes do.
FETCH_S = 1.5
ROUND_S = 0.6


class PoolCopies(Protocol):
    """The part of `ClientGuard` that a fetch uses."""

    def replicas(self, names: Sequence[str]) -> dict[str, list[Replica]]:
        """The replicas of each value that the pool has."""


class ReplicaReads(Protocol):
    """The part of `NodeReaders` that a fetch uses."""

    def is_stuck(self, endpoint: str) -> bool:
        """Whether the node does not answer its running read."""

    def is_suspect(self, endpoint: str) -> bool:
        """Whether the node failed a read recently."""

    def read(self, endpoint: str, elements: Sequence[ValueRead], *, deadline_s: float) -> Future[list[bool]]:
        """Start a read; its future gives whether each element has arrived."""


Late = Future[list[bool]]


@dataclass(slots=True)
class Fetched:
    """Outcome of each value: its length, or MISSING, UNREACHABLE, CORRUPT.

    `late`: reads that still run and write to their extents. `unreadable`: names of values without a whole
    replica.
    """

    outcome: list[int]
    late: list[Future[list[bool]]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    failovers: int = 0


@dataclass(slots=True)
class _Wanted:
    key: bytes
    extent: Extent
    n_bytes: int
    copies: list[Replica]
    tried: int = 0
    stalled: bool = False


class Fetcher:
    """Reads values and headers. Thread-safe."""

    def __init__(
        self,
        store: PoolCopies,
        readers: ReplicaReads,
        memory: SharedMemory,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._readers = readers
        self._memory = memory
        self._clock_s = clock_s

    def fetch(self, keys: Sequence[bytes], extents: Sequence[Extent], sizes: Sequence[int]) -> Fetched:
        """Read values of these lengths into the extents. Raises what `ClientGuard` raises.

        Blocks for at most FETCH_S and one call to the master.
        """
        found = self._store.replicas([name_of(key) for key in keys])
        fetched = Fetched([MISSING] * len(keys))
        waiting: dict[int, _Wanted] = {}
        for index, (key, extent, n_bytes) in enumerate(zip(keys, extents, sizes, strict=True)):
            copies = sorted(
                found.get(name_of(key), ()), key=lambda copy: self._readers.is_suspect(copy.endpoint)
            )
            if copies:
                waiting[index] = _Wanted(key, extent, n_bytes, copies)
        deadline_s = self._clock_s() + FETCH_S
        while waiting:
            self._round(waiting, fetched, deadline_s=deadline_s)
        return fetched

    def headers(self, keys: Sequence[bytes], extents: Sequence[Extent]) -> tuple[list[bool], list[Late]]:
        """Read the headers of these values, each from one replica, into the extents.

        Returns which headers arrived, and the reads that still run. Blocks like `fetch`.
        """
        found = self._store.replicas([name_of(key) for key in keys])
        deadline_s = self._clock_s() + FETCH_S
        groups: dict[str, list[int]] = {}
        addresses: dict[int, int] = {}
        for index, key in enumerate(keys):
            for copy in found.get(name_of(key), ())[:1]:
                if copy.n_bytes > HEADER_BYTES and not self._readers.is_stuck(copy.endpoint):
                    groups.setdefault(copy.endpoint, []).append(index)
                    addresses[index] = copy.address
        jobs: dict[str, Late] = {}
        for endpoint, indexes in groups.items():
            elements = [
                ValueRead(self._memory.address + extents[index].offset, addresses[index], HEADER_BYTES)
                for index in indexes
            ]
            jobs[endpoint] = self._readers.read(endpoint, elements, deadline_s=deadline_s)
        wait(jobs.values(), timeout=ROUND_S)
        arrived, late = [False] * len(keys), []
        for endpoint, indexes in groups.items():
            if not jobs[endpoint].done():
                late.append(jobs[endpoint])
                continue
            for index, came in zip(indexes, jobs[endpoint].result(), strict=True):
                arrived[index] = came
        return arrived, late

    def _round(self, waiting: dict[int, _Wanted], fetched: Fetched, *, deadline_s: float) -> None:
        """Read the next replica of each waiting value."""
        groups: dict[str, list[int]] = {}
        for index, wanted in list(waiting.items()):
            copy = self._next_copy(wanted)
            if copy is None:
                self._fail(index, waiting, fetched)
            else:
                groups.setdefault(copy.endpoint, []).append(index)
        jobs = {
            endpoint: self._readers.read(
                endpoint, [self._element(waiting[index]) for index in indexes], deadline_s=deadline_s
            )
            for endpoint, indexes in groups.items()
        }
        wait(jobs.values(), timeout=max(0.0, min(ROUND_S, deadline_s - self._clock_s())))
        for endpoint, indexes in groups.items():
            job = jobs[endpoint]
            arrived = job.result() if job.done() else None
            if arrived is None:
                fetched.late.append(job)
            for position, index in enumerate(indexes):
                self._record(index, None if arrived is None else arrived[position], waiting, fetched)

    def _next_copy(self, wanted: _Wanted) -> Replica | None:
        while wanted.copies:
            copy = wanted.copies[0]
            if copy.n_bytes == wanted.n_bytes and not self._readers.is_stuck(copy.endpoint):
                return copy
            wanted.stalled |= copy.n_bytes == wanted.n_bytes
            wanted.tried += 1
            wanted.copies.pop(0)
        return None

    def _element(self, wanted: _Wanted) -> ValueRead:
        address = self._memory.address + wanted.extent.offset
        return ValueRead(address, wanted.copies[0].address, wanted.n_bytes)

    def _record(
        self, index: int, arrived: bool | None, waiting: dict[int, _Wanted], fetched: Fetched
    ) -> None:
        """Record the result of one replica; `arrived` is None if the node did not answer in time."""
        wanted = waiting[index]
        wanted.copies.pop(0)
        if arrived and verify_value(self._memory.view(wanted.extent.offset, wanted.n_bytes), wanted.key):
            fetched.outcome[index] = wanted.n_bytes
            fetched.failovers += wanted.tried > 0
            del waiting[index]
            return
        wanted.tried += 1
        wanted.stalled |= arrived is None
        fetched.outcome[index] = CORRUPT if arrived else min(UNREACHABLE, fetched.outcome[index])

    def _fail(self, index: int, waiting: dict[int, _Wanted], fetched: Fetched) -> None:
        """Record that no replica is left.

        A stopped node may come back with its replica. A value without a stalled replica is unreadable.
        The agent removes it, since it blocks every new put.
        """
        wanted = waiting.pop(index)
        fetched.outcome[index] = min(UNREACHABLE, fetched.outcome[index])
        if not wanted.stalled:
            fetched.unreadable.append(name_of(wanted.key))

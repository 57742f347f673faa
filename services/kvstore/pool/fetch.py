"""Values out of the pool: where the copies are, each read and verified, the next copy when one is bad.

Runs in the pool agent's process. A stalled copy may still land where the next one was read to: the node
verifies once more what it has copied for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Protocol

from services.kvstore.pool.agent.client_guard import Replica
from services.kvstore.pool.agent.node_readers import Element
from services.kvstore.pool.agent.staging import Extent, SharedMemory
from services.kvstore.pool.value import HEADER_BYTES, name_of, open_value

MISSING, UNREACHABLE, CORRUPT = 0, -1, -2
# A fetch answers by then, whatever the nodes do; it waits so long for one round of copies.
FETCH_S = 1.5
ROUND_S = 0.6


class Copies(Protocol):
    """Of `GuardedStore`, what a fetch needs."""

    def replicas(self, names: Sequence[str]) -> dict[str, list[Replica]]:
        """Where each value that is there lies."""


class ReplicaReads(Protocol):
    """Of `Lanes`, what a fetch needs."""

    def stuck(self, endpoint: str) -> bool:
        """Whether the node does not answer."""

    def suspect(self, endpoint: str) -> bool:
        """Whether the node failed lately."""

    def read(self, endpoint: str, elements: Sequence[Element], *, give_up_at_s: float) -> Future[list[bool]]:
        """Whether each element has arrived."""


Late = Future[list[bool]]


@dataclass(slots=True)
class Fetched:
    """How each value ended: its length, or MISSING, UNREACHABLE, CORRUPT. `late`: reads that still run and
    write to their extents. `hopeless`: names of values that no copy gives."""

    outcome: list[int]
    late: list[Future[list[bool]]] = field(default_factory=list)
    hopeless: list[str] = field(default_factory=list)
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
    """Thread-safe."""

    def __init__(
        self,
        store: Copies,
        lanes: ReplicaReads,
        memory: SharedMemory,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._lanes = lanes
        self._memory = memory
        self._clock_s = clock_s

    def fetch(self, keys: Sequence[bytes], extents: Sequence[Extent], sizes: Sequence[int]) -> Fetched:
        """Read the values of these lengths to the extents. Blocks, FETCH_S and one question to the master
        at most. Raises what the guard raises."""
        found = self._store.replicas([name_of(key) for key in keys])
        fetched = Fetched([MISSING] * len(keys))
        waiting: dict[int, _Wanted] = {}
        for index, (key, extent, n_bytes) in enumerate(zip(keys, extents, sizes, strict=True)):
            copies = sorted(found.get(name_of(key), ()), key=lambda copy: self._lanes.suspect(copy.endpoint))
            if copies:
                waiting[index] = _Wanted(key, extent, n_bytes, copies)
        give_up_at_s = self._clock_s() + FETCH_S
        while waiting:
            self._round(waiting, fetched, give_up_at_s=give_up_at_s)
        return fetched

    def heads(self, keys: Sequence[bytes], extents: Sequence[Extent]) -> tuple[list[bool], list[Late]]:
        """Read the headers of these values, each from one copy, to the extents; which arrived, and reads that
        still run. Blocks as `fetch`."""
        found = self._store.replicas([name_of(key) for key in keys])
        give_up_at_s = self._clock_s() + FETCH_S
        groups: dict[str, list[int]] = {}
        addresses: dict[int, int] = {}
        for index, key in enumerate(keys):
            for copy in found.get(name_of(key), ())[:1]:
                if copy.n_bytes > HEADER_BYTES and not self._lanes.stuck(copy.endpoint):
                    groups.setdefault(copy.endpoint, []).append(index)
                    addresses[index] = copy.address
        jobs: dict[str, Late] = {}
        for endpoint, indexes in groups.items():
            elements = [
                Element(self._memory.address + extents[index].offset, addresses[index], HEADER_BYTES)
                for index in indexes
            ]
            jobs[endpoint] = self._lanes.read(endpoint, elements, give_up_at_s=give_up_at_s)
        wait(jobs.values(), timeout=ROUND_S)
        arrived, late = [False] * len(keys), []
        for endpoint, indexes in groups.items():
            if not jobs[endpoint].done():
                late.append(jobs[endpoint])
                continue
            for index, came in zip(indexes, jobs[endpoint].result(), strict=True):
                arrived[index] = came
        return arrived, late

    def _round(self, waiting: dict[int, _Wanted], fetched: Fetched, *, give_up_at_s: float) -> None:
        """Read the next copy of each value that waits."""
        groups: dict[str, list[int]] = {}
        for index, wanted in list(waiting.items()):
            copy = self._next_copy(wanted)
            if copy is None:
                self._give_up(index, waiting, fetched)
            else:
                groups.setdefault(copy.endpoint, []).append(index)
        jobs = {
            endpoint: self._lanes.read(
                endpoint, [self._element(waiting[index]) for index in indexes], give_up_at_s=give_up_at_s
            )
            for endpoint, indexes in groups.items()
        }
        wait(jobs.values(), timeout=max(0.0, min(ROUND_S, give_up_at_s - self._clock_s())))
        for endpoint, indexes in groups.items():
            job = jobs[endpoint]
            arrived = job.result() if job.done() else None
            if arrived is None:
                fetched.late.append(job)
            for position, index in enumerate(indexes):
                self._judge(index, None if arrived is None else arrived[position], waiting, fetched)

    def _next_copy(self, wanted: _Wanted) -> Replica | None:
        while wanted.copies:
            copy = wanted.copies[0]
            if copy.n_bytes == wanted.n_bytes and not self._lanes.stuck(copy.endpoint):
                return copy
            wanted.stalled |= copy.n_bytes == wanted.n_bytes
            wanted.tried += 1
            wanted.copies.pop(0)
        return None

    def _element(self, wanted: _Wanted) -> Element:
        address = self._memory.address + wanted.extent.offset
        return Element(address, wanted.copies[0].address, wanted.n_bytes)

    def _judge(self, index: int, arrived: bool | None, waiting: dict[int, _Wanted], fetched: Fetched) -> None:
        """`arrived`: None when the node has not answered in time."""
        wanted = waiting[index]
        wanted.copies.pop(0)
        if arrived and open_value(self._memory.view(wanted.extent.offset, wanted.n_bytes), wanted.key):
            fetched.outcome[index] = wanted.n_bytes
            fetched.failovers += wanted.tried > 0
            del waiting[index]
            return
        wanted.tried += 1
        wanted.stalled |= arrived is None
        fetched.outcome[index] = CORRUPT if arrived else min(UNREACHABLE, fetched.outcome[index])

    def _give_up(self, index: int, waiting: dict[int, _Wanted], fetched: Fetched) -> None:
        """No copy is left. A node that is only stopped may come back; other values are of no use to
        anyone, and while they are there nobody can put them anew."""
        wanted = waiting.pop(index)
        fetched.outcome[index] = min(UNREACHABLE, fetched.outcome[index])
        if not wanted.stalled:
            fetched.hopeless.append(name_of(wanted.key))

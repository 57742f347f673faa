"""Reads of values from the nodes that hold them, replica by replica. Runs in the pool agent's process.

The store's own get takes one replica and fails when that node is gone, and its first contact with a node
that is stopped blocks for a minute. So the agent asks the master where the copies are and reads them with
engines of its own: each node has one thread and one engine, a lane, and a node that does not answer blocks
its own lane and nothing else. (In one engine, a first contact that hangs keeps all other first contacts
waiting.) What fails there is read from the next copy.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

# When there are more, the one that is idle for longest goes: most likely its node is gone.
MAX_LANES = 32
LANE_ELEMENTS = 8
# A lane whose call runs for so long belongs to a node that is dead or stopped.
STUCK_S = 0.5
# A node that refused or dropped a read is asked last for so long; the master has forgotten it by then.
SUSPECT_S = 5.0
# While bytes flow the next value is there within a millisecond; a node that stalls is asked seldom.
_POLL_MIN_S, _POLL_BUSY_S, _POLL_MAX_S = 0.00015, 0.0004, 0.005
_BUSY_POLLS = 60
_DONE, _FAILED = 1, -1


@dataclass(frozen=True, slots=True)
class Element:
    """One value to read."""

    local_address: int
    remote_address: int
    n_bytes: int


@dataclass(slots=True, eq=False)
class _Job:
    endpoint: str
    elements: Sequence[Element]
    give_up_at_s: float
    ended: Future[list[bool]] = field(default_factory=Future)


class NodeReaders:
    """The nodes that this agent reads from."""

    def __init__(
        self, open_engine: Callable[[], Any], *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_engine` makes an initialised TransferEngine with the destinations registered."""
        self._open_engine = open_engine
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._lanes: dict[str, _Lane] = {}
        self._suspect_until_s: dict[str, float] = {}

    def stuck(self, endpoint: str) -> bool:
        """Whether the node keeps its lane waiting: a read from it would only wait behind."""
        with self._lock:
            lane = self._lanes.get(endpoint)
        return lane is not None and lane.busy_for_s(self._clock_s()) > STUCK_S

    def suspect(self, endpoint: str) -> bool:
        """Whether the node failed a read lately."""
        with self._lock:
            return self._clock_s() < self._suspect_until_s.get(endpoint, 0.0)

    def read(self, endpoint: str, elements: Sequence[Element], *, give_up_at_s: float) -> Future[list[bool]]:
        """Whether each element has arrived. Not begun after `give_up_at_s`; one that was goes on."""
        job = _Job(endpoint, elements, give_up_at_s)
        with self._lock:
            lane = self._lanes.get(endpoint)
            if lane is None:
                if len(self._lanes) >= MAX_LANES:
                    self._drop_idle_lane()
                lane = self._lanes[endpoint] = _Lane(self._open_engine, self._clock_s)
            lane.jobs.put(job)
        job.ended.add_done_callback(lambda ended: self._ended(endpoint, ended))
        return job.ended

    def _ended(self, endpoint: str, ended: Future[list[bool]]) -> None:
        with self._lock:
            if all(ended.result()):
                self._suspect_until_s.pop(endpoint, None)
            else:
                self._suspect_until_s[endpoint] = self._clock_s() + SUSPECT_S

    def _drop_idle_lane(self) -> None:
        idle = [(lane.idle_since_s, endpoint) for endpoint, lane in self._lanes.items() if lane.idle]
        if idle:
            _, endpoint = min(idle)
            self._lanes.pop(endpoint).jobs.put(None)
            self._suspect_until_s.pop(endpoint, None)


class _Lane:
    """One node's thread."""

    def __init__(self, open_engine: Callable[[], Any], clock_s: Callable[[], float]) -> None:
        self.jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.busy_since_s: float | None = None
        self.idle_since_s = clock_s()
        self._open_engine = open_engine
        self._engine: Any = None
        self._clock_s = clock_s
        threading.Thread(target=self._run, daemon=True, name="pool-lane").start()

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return self.busy_since_s is None and self.jobs.empty()

    def busy_for_s(self, now_s: float) -> float:
        """How long the job that runs has been running."""
        since_s = self.busy_since_s
        return 0.0 if since_s is None else now_s - since_s

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            self.busy_since_s = now_s = self._clock_s()
            arrived = [False] * len(job.elements)
            if now_s < job.give_up_at_s and self._opened(job.endpoint):
                try:
                    self._transfer(job, arrived)
                except Exception:
                    # A defect: what was handed in may still land. This read never ends, and all others go
                    # around the lane, until the node has lost its patience and kills this process.
                    log.exception("pool: it is not known what became of a read from %s", job.endpoint)
                    return
            self.busy_since_s, self.idle_since_s = None, self._clock_s()
            job.ended.set_result(arrived)

    def _opened(self, endpoint: str) -> bool:
        """Whether there is an engine. A defect, too, is only a failure: the next read may do better."""
        try:
            self._engine = self._engine or self._open_engine()
        except Exception as error:
            log.warning("pool: no engine to read from %s: %s", endpoint, error)
        return self._engine is not None

    def _transfer(self, job: _Job, arrived: list[bool]) -> None:
        """Fill in which elements arrived. The engine ends a stalled element by itself after 2 s."""
        outstanding: dict[int, int] = {}  # one element per id: the status of an id is that of its first
        following, failed, sleep_s, in_vain = 0, False, _POLL_MIN_S, 0
        while outstanding or (following < len(job.elements) and not failed):
            while not failed and following < len(job.elements) and len(outstanding) < LANE_ELEMENTS:
                element = job.elements[following]
                number = self._engine.batch_transfer_async_read(
                    job.endpoint, [element.local_address], [element.remote_address], [element.n_bytes]
                )
                if not 0 < number < 1 << 63:  # 0 or -1: refused
                    failed = True
                    break
                outstanding[number] = following
                following += 1
            statuses = {number: self._engine.transfer_check_status(number) for number in outstanding}
            for number, status in statuses.items():
                if status in (_DONE, _FAILED):  # final: the id must not be asked after again
                    arrived[outstanding.pop(number)] = status == _DONE
                    failed = failed or status == _FAILED
            ended = any(status in (_DONE, _FAILED) for status in statuses.values())
            in_vain = 0 if ended else in_vain + 1
            longest_s = _POLL_BUSY_S if in_vain < _BUSY_POLLS else _POLL_MAX_S
            sleep_s = _POLL_MIN_S if ended else min(2 * sleep_s, longest_s)
            if outstanding:
                time.sleep(sleep_s)

"""Reads of values from the nodes that hold them, replica by replica. Runs in the pool agent's process.

The store's own get reads one replica and fails when that node is gone, and its first contact with a stopped
node blocks for a minute. So the agent asks the master for the replicas and reads them with its own engines.
Each node has a reader with one thread and one engine, so a node that does not answer blocks only its own
reader. (In a shared engine, a first contact that hangs blocks all other first contacts.) A failed read moves
on to the next replica.
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

# When all are in use, the reader that was idle longest is closed: its node is probably gone.
MAX_READERS = 32
READER_ELEMENTS = 8
# A read that runs this long belongs to a dead or stopped node.
STUCK_S = 0.5
# A node that failed a read is tried last for this long; the master has removed it by then.
SUSPECT_S = 5.0
# While bytes flow the next value arrives within a millisecond; a stalled node is polled rarely.
_POLL_MIN_S, _POLL_BUSY_S, _POLL_MAX_S = 0.00015, 0.0004, 0.005
_BUSY_POLLS = 60
_DONE, _FAILED = 1, -1


@dataclass(frozen=True, slots=True)
class ValueRead:
    """One value to read."""

    local_address: int
    remote_address: int
    n_bytes: int


@dataclass(slots=True, eq=False)
class _ReadTask:
    endpoint: str
    elements: Sequence[ValueRead]
    deadline_s: float
    ended: Future[list[bool]] = field(default_factory=Future)


class NodeReaders:
    """The readers of all nodes that this agent reads from."""

    def __init__(
        self, open_engine: Callable[[], Any], *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """`open_engine` returns an initialised TransferEngine with the destinations registered."""
        self._open_engine = open_engine
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._readers: dict[str, _Reader] = {}
        self._suspect_until_s: dict[str, float] = {}

    def is_stuck(self, endpoint: str) -> bool:
        """Whether the node's running read is overdue, so that another would only queue behind it."""
        with self._lock:
            reader = self._readers.get(endpoint)
        return reader is not None and reader.busy_for_s(self._clock_s()) > STUCK_S

    def is_suspect(self, endpoint: str) -> bool:
        """Whether the node failed a read recently."""
        with self._lock:
            return self._clock_s() < self._suspect_until_s.get(endpoint, 0.0)

    def read(self, endpoint: str, elements: Sequence[ValueRead], *, deadline_s: float) -> Future[list[bool]]:
        """Queue a read; its future gives whether each element has arrived.

        A read that has not started by `deadline_s` fails; a running one goes on.
        """
        job = _ReadTask(endpoint, elements, deadline_s)
        with self._lock:
            reader = self._readers.get(endpoint)
            if reader is None:
                if len(self._readers) >= MAX_READERS:
                    self._drop_idle_reader()
                reader = self._readers[endpoint] = _Reader(self._open_engine, self._clock_s)
            reader.jobs.put(job)
        job.ended.add_done_callback(lambda ended: self._ended(endpoint, ended))
        return job.ended

    def _ended(self, endpoint: str, ended: Future[list[bool]]) -> None:
        with self._lock:
            if all(ended.result()):
                self._suspect_until_s.pop(endpoint, None)
            else:
                self._suspect_until_s[endpoint] = self._clock_s() + SUSPECT_S

    def _drop_idle_reader(self) -> None:
        idle = [(reader.idle_since_s, endpoint) for endpoint, reader in self._readers.items() if reader.idle]
        if idle:
            _, endpoint = min(idle)
            self._readers.pop(endpoint).jobs.put(None)
            self._suspect_until_s.pop(endpoint, None)


class _Reader:
    """The thread and the engine that read from one node."""

    def __init__(self, open_engine: Callable[[], Any], clock_s: Callable[[], float]) -> None:
        self.jobs: queue.SimpleQueue[_ReadTask | None] = queue.SimpleQueue()
        self.busy_since_s: float | None = None
        self.idle_since_s = clock_s()
        self._open_engine = open_engine
        self._engine: Any = None
        self._clock_s = clock_s
        threading.Thread(target=self._run, daemon=True, name="pool-reader").start()

    @property
    def idle(self) -> bool:
        """Whether no read runs or waits."""
        return self.busy_since_s is None and self.jobs.empty()

    def busy_for_s(self, now_s: float) -> float:
        """How long the running read has been running; 0 when none runs."""
        since_s = self.busy_since_s
        return 0.0 if since_s is None else now_s - since_s

    def _run(self) -> None:
        while (job := self.jobs.get()) is not None:
            self.busy_since_s = now_s = self._clock_s()
            arrived = [False] * len(job.elements)
            if now_s < job.deadline_s and self._has_engine(job.endpoint):
                try:
                    self._transfer(job, arrived)
                except Exception:
                    # A defect: bytes of the submitted reads may still land. The read never ends, so others
                    # avoid this reader until the node finds it hanging and kills this process.
                    log.exception("pool: it is not known what became of a read from %s", job.endpoint)
                    return
            self.busy_since_s, self.idle_since_s = None, self._clock_s()
            job.ended.set_result(arrived)

    def _has_engine(self, endpoint: str) -> bool:
        """Whether an engine is open. A defect fails only this read: the next one tries again."""
        try:
            self._engine = self._engine or self._open_engine()
        except Exception as error:
            log.warning("pool: no engine to read from %s: %s", endpoint, error)
        return self._engine is not None

    def _transfer(self, job: _ReadTask, arrived: list[bool]) -> None:
        """Record which elements arrived. The engine fails a stalled element after 2 s."""
        outstanding: dict[int, int] = {}  # one element per id: an id's status is that of its first element
        following, failed, sleep_s, in_vain = 0, False, _POLL_MIN_S, 0
        while outstanding or (following < len(job.elements) and not failed):
            while not failed and following < len(job.elements) and len(outstanding) < READER_ELEMENTS:
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
                if status in (_DONE, _FAILED):  # final: the id must not be polled again
                    arrived[outstanding.pop(number)] = status == _DONE
                    failed = failed or status == _FAILED
            ended = any(status in (_DONE, _FAILED) for status in statuses.values())
            in_vain = 0 if ended else in_vain + 1
            longest_s = _POLL_BUSY_S if in_vain < _BUSY_POLLS else _POLL_MAX_S
            sleep_s = _POLL_MIN_S if ended else min(2 * sleep_s, longest_s)
            if outstanding:
                time.sleep(sleep_s)

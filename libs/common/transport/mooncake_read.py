"""One read by Mooncake's engine: it submits elements within the peer's bound, polls them, reports their ends.

The poller's thread calls `step` of all reads in turn (read_poller.py), so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from libs.common.transport.base import Landed, ReadOp, TransferRefused
from libs.common.transport.incarnation_probe import NONCE_BYTES, ProbeAddress, greet
from libs.common.transport.multi_engine import addresses_of

log = logging.getLogger(__name__)

# Connections to one peer, and the most elements that the engine holds for it at any time.
LANES = 8
READS_PER_PEER = 2
# Large enough that a few keep the wire busy between polls, small enough to stop soon after a cancel.
ELEMENT_BYTES = 2 << 20
# xxh3 takes 50 to 250 us for so many bytes, about as long as a change of threads on a busy machine.
_LANDED_INLINE_BYTES = 2 << 20
_DONE, _FAILED = 1, -1
# Every fourth poll covers all elements; the others stop at the first element that has not ended.
_FULL_POLL_INTERVAL = 4
# While elements end, waiting ones are submitted at once. The bound gives other reads their turn.
_MAX_ROUNDS_PER_STEP = 32


class MooncakePeer:
    """One incarnation of a peer: whether it was seen alive, and its reads and elements in the engine.

    A single read may use all lanes; several reads share them evenly.
    """

    def __init__(self, session_id: str) -> None:
        try:
            self.engine_address, probe_port, nonce = session_id.split("/")
            host, port = self.engine_address.rsplit(":", 1)
            self.probe = ProbeAddress(host, int(probe_port), bytes.fromhex(nonce))
            valid = 0 < int(port) < 65536 and len(self.probe.nonce) == NONCE_BYTES
        except ValueError:
            valid = False
        if not valid:
            raise TransferRefused("not a session id of the mooncake transport")
        self.addresses: tuple[str, ...] = (self.engine_address,)  # of all its engines, after a greeting
        self.slots = asyncio.Semaphore(READS_PER_PEER)
        self.seen_alive = False
        self.reached = False  # whether all our engines have read from it since the last failure
        self.reached_by: set[int] = set()  # our engines that have read from it, until `reached`
        self.n_readers = 0
        self.n_elements = 0

    def room(self, own_elements: int) -> int:
        """How many more elements a read with `own_elements` outstanding may submit."""
        fair = LANES // max(1, self.n_readers) - own_elements
        return max(0, min(fair, LANES - self.n_elements))

    async def ensure_alive(self) -> None:
        """Ask the incarnation probe, unless all engines have read from the peer since the last failure."""
        if not (self.seen_alive and self.reached):
            self.addresses = addresses_of(self.engine_address, await greet(self.probe))
            self.seen_alive = True

    async def ensure_alive_after_failure(self) -> None:
        """Raises PeerGone or TransferTimeout if the peer no longer answers."""
        self.seen_alive = self.reached = False
        self.reached_by.clear()
        await self.ensure_alive()


@dataclass(slots=True)
class _PendingRead:
    """A ReadOp and how many of its elements have not ended."""

    op: ReadOp
    n_elements: int


class MooncakeRead:
    """The elements of one read. The read is over only when the engine holds none of them."""

    def __init__(
        self,
        engine: Any,
        calls: Executor,
        peer: MooncakePeer,
        reads: Sequence[ReadOp],
        landed: Landed | None,
        stop: asyncio.Event,
        keep_alive: object,
    ) -> None:
        """`calls`: threads for blocking calls. `keep_alive` keeps the buffers alive."""
        self._engine = engine
        self._calls = calls
        self.peer = peer
        self._landed = landed
        self._stop = stop
        self._keep_alive = keep_alive
        self._waiting: deque[tuple[ReadOp, _PendingRead]] = deque()
        # A first read has at least two elements, so that it contacts all engines of a peer known to be alive.
        halves = max(1, sum(op.n_bytes for op in reads) // 2)
        element_bytes = ELEMENT_BYTES if peer.reached else min(ELEMENT_BYTES, halves)
        self._pending_reads: list[_PendingRead] = []
        for op in reads:
            pieces = list(split_reads([op], element_bytes))
            pending = _PendingRead(op, len(pieces))
            self._pending_reads.append(pending)
            self._waiting.extend((piece, pending) for piece in pieces)
        self._outstanding: dict[int, _PendingRead] = {}
        self._contact: tuple[Future[list[int]], list[_PendingRead]] | None = None
        self._reports: list[Future[None]] = []  # calls of `landed` in other threads
        self.n_done = 0  # elements that landed
        self.failed = False  # the engine refused or failed an element
        self._n_polls = 0
        self.error: Exception | None = None  # the error that `landed` raised

    @property
    def complete(self) -> bool:
        """Whether every byte has landed."""
        return not (self.failed or self._waiting or self._outstanding or self._contact)

    @property
    def missing(self) -> list[ReadOp]:
        """The ops that have not landed, for a read that is over."""
        return [pending.op for pending in self._pending_reads if pending.n_elements]

    @property
    def reached(self) -> bool:
        """Whether all engines have read from the peer, in this read or in others.

        Of two simultaneous first reads, each may have used only one engine.
        """
        return self.complete and (self.peer.reached or len(self.peer.reached_by) >= self._engine.n_rails)

    @property
    def over(self) -> bool:
        """Whether the engine and `landed` have ended with the memory, and no element will be submitted."""
        busy = self._outstanding or self._contact is not None or not all(r.done() for r in self._reports)
        return not busy and not (self._waiting and self._may_submit)

    @property
    def _may_submit(self) -> bool:
        return not (self.failed or self.error is not None or self._stop.is_set())

    def step(self) -> bool:
        """Submit as many elements as allowed and poll the outstanding ones. Returns whether any has ended."""
        ended = False
        for _ in range(_MAX_ROUNDS_PER_STEP):
            if not self._round():
                break
            ended = True
            if not (self._waiting and self._may_submit):
                break
        return ended

    def _round(self) -> bool:
        if self._contact is not None and self._contact[0].done():
            future, pending_reads = self._contact
            self._contact = None
            self._on_submitted(future.result(), pending_reads)
        if self._may_submit and self._contact is None:
            room = min(self.peer.room(len(self._outstanding)), len(self._waiting))
            if room:
                self._submit([self._waiting.popleft() for _ in range(room)])
        return self._poll()

    def raise_error(self) -> None:
        """Raises the error of `landed`, if any."""
        for report in self._reports:
            report.result()
        if self.error is not None:
            raise self.error

    def _submit(self, elements: Sequence[tuple[ReadOp, _PendingRead]]) -> None:
        """Submit elements; in another thread for the first contact, which blocks."""
        self.peer.n_elements += len(elements)
        call = self._call([op for op, _ in elements])
        pending_reads = [pending for _, pending in elements]
        if self.peer.reached:
            self._on_submitted(call(), pending_reads)
        else:
            self._contact = self._calls.submit(call), pending_reads

    def _on_submitted(self, ids: Sequence[int], pending_reads: Sequence[_PendingRead]) -> None:
        """Record the elements that the engine accepted: as many as there are ids."""
        self.peer.n_elements -= len(pending_reads) - len(ids)
        self.failed |= len(ids) < len(pending_reads)
        self._outstanding.update(zip(ids, pending_reads, strict=False))

    def _call(self, ops: Sequence[ReadOp]) -> Callable[[], list[int]]:
        engine, peer, keep_alive = self._engine, self.peer, self._keep_alive

        def call() -> list[int]:
            ids: list[int] = []
            assert keep_alive  # this call keeps the buffers alive, even if the transport closes meanwhile
            for op in ops:
                try:
                    found = engine.batch_transfer_async_read(
                        peer.addresses, [op.local_address], [op.remote_address], [op.n_bytes]
                    )
                except Exception:  # the engine still reads the elements before this one
                    log.exception("the engine refuses a read from %s", peer.engine_address)
                    break
                if not 0 < found < 1 << 63:  # 0 and -1 mean refused
                    break
                ids.append(found)
            return ids

        return call

    def _poll(self) -> bool:
        """Poll the outstanding elements, oldest first. Returns whether any has ended."""
        self._n_polls += 1
        ended: list[tuple[int, int]] = []
        for element in self._outstanding:
            rail = -1 if self.peer.reached else self._engine.rail_of(element)
            status = self._engine.transfer_check_status(element)
            if status == _DONE and rail >= 0:
                self.peer.reached_by.add(rail)
            if status in (_DONE, _FAILED):
                ended.append((element, status))
            elif self._n_polls % _FULL_POLL_INTERVAL:
                break  # later elements take as long, and each check may wait for the interpreter lock
        for element, status in ended:
            pending = self._outstanding.pop(element)
            self.peer.n_elements -= 1
            if status == _FAILED:
                self.failed = True
                continue
            self.n_done += 1
            pending.n_elements -= 1
            if pending.n_elements == 0 and self._landed is not None:
                self._report(self._landed, pending.op)
        return bool(ended)

    def _report(self, landed: Landed, op: ReadOp) -> None:
        if op.n_bytes > _LANDED_INLINE_BYTES:
            self._reports.append(self._calls.submit(landed, op))
            return
        try:
            landed(op)
        except Exception as error:  # raised after the engine's last write
            self.error = error


def split_reads(reads: Sequence[ReadOp], max_bytes: int) -> Iterator[ReadOp]:
    """Split reads into pieces of at most `max_bytes`."""
    for op in reads:
        for start in range(0, op.n_bytes, max_bytes):
            n_bytes = min(max_bytes, op.n_bytes - start)
            yield ReadOp(op.local_address + start, op.remote_address + start, n_bytes)

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
# xxh3 takes 50 to 250 us for so much, about what handing it to another thread costs on a busy machine.
_LANDED_INLINE_BYTES = 2 << 20
_DONE, _FAILED = 1, -1
# Every fourth poll covers all elements; the others stop at the first element that has not ended.
_THOROUGH_LOOKS = 4
# While elements end, waiting ones are submitted at once; the bound lets other reads have their turn.
_ROUNDS_A_STEP = 32


class MooncakePeer:
    """One incarnation of a peer: whether it was seen alive, and what the engine holds for it.

    A read alone may use all lanes; several share them evenly.
    """

    def __init__(self, session_id: str) -> None:
        try:
            self.engine_address, beacon_port, nonce = session_id.split("/")
            host, port = self.engine_address.rsplit(":", 1)
            self.beacon = ProbeAddress(host, int(beacon_port), bytes.fromhex(nonce))
            valid = 0 < int(port) < 65536 and len(self.beacon.nonce) == NONCE_BYTES
        except ValueError:
            valid = False
        if not valid:
            raise TransferRefused("not a session id of the mooncake transport")
        self.addresses: tuple[str, ...] = (self.engine_address,)  # of all its engines, once it was greeted
        self.slots = asyncio.Semaphore(READS_PER_PEER)
        self.seen_alive = False
        self.reached = False  # bytes have come by all our engines since the last failure
        self.met: set[int] = set()  # those by which they have, until then
        self.n_readers = 0
        self.n_elements = 0

    def room(self, own_elements: int) -> int:
        """How many more elements a read that has `own_elements` outstanding may hand in."""
        fair = LANES // max(1, self.n_readers) - own_elements
        return max(0, min(fair, LANES - self.n_elements))

    async def ensure_alive(self) -> None:
        """Ask the incarnation probe until the peer's engines were reached, and after each failure."""
        if not (self.seen_alive and self.reached):
            self.addresses = addresses_of(self.engine_address, await greet(self.beacon))
            self.seen_alive = True

    async def ensure_alive_after_failure(self) -> None:
        """Raises PeerGone or TransferTimeout when that is why an element failed."""
        self.seen_alive = self.reached = False
        self.met.clear()
        await self.ensure_alive()


@dataclass(slots=True)
class _Landing:
    """A ReadOp and how many of its elements have not ended."""

    op: ReadOp
    n_elements: int


class MooncakeRead:
    """The elements of one read. It is over only when the engine holds none of them any more."""

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
        """`calls`: threads for what blocks. `keep_alive` keeps the buffers alive."""
        self._engine = engine
        self._calls = calls
        self.peer = peer
        self._landed = landed
        self._stop = stop
        self._keep_alive = keep_alive
        self._waiting: deque[tuple[ReadOp, _Landing]] = deque()
        # The first one contacts all engines of the peer, while it is known to be alive.
        halves = max(1, sum(op.n_bytes for op in reads) // 2)
        element_bytes = ELEMENT_BYTES if peer.reached else min(ELEMENT_BYTES, halves)
        self._landings: list[_Landing] = []
        for op in reads:
            pieces = list(split_reads([op], element_bytes))
            landing = _Landing(op, len(pieces))
            self._landings.append(landing)
            self._waiting.extend((piece, landing) for piece in pieces)
        self._outstanding: dict[int, _Landing] = {}
        self._contact: tuple[Future[list[int]], list[_Landing]] | None = None
        self._reports: list[Future[None]] = []  # calls of `landed` in other threads
        self.n_done = 0  # elements that landed
        self.failed = False  # the engine refused or failed an element
        self._looks = 0
        self.error: Exception | None = None  # what `landed` raised

    @property
    def complete(self) -> bool:
        """Whether every byte has landed."""
        return not (self.failed or self._waiting or self._outstanding or self._contact)

    @property
    def missing(self) -> list[ReadOp]:
        """What has not landed, once the read is over."""
        return [landing.op for landing in self._landings if landing.n_elements]

    @property
    def reached(self) -> bool:
        """Whether the peer can be reached by all engines, as far as this read and others have shown: of two
        first reads at once each may have had one engine."""
        return self.complete and (self.peer.reached or len(self.peer.met) >= self._engine.n_rails)

    @property
    def over(self) -> bool:
        """Whether neither the engine nor `landed` touches the memory any more, and nothing will follow."""
        busy = self._outstanding or self._contact is not None or not all(r.done() for r in self._reports)
        return not busy and not (self._waiting and self._going)

    @property
    def _going(self) -> bool:
        return not (self.failed or self.error is not None or self._stop.is_set())

    def step(self) -> bool:
        """Submit what there is room for and poll what is outstanding; returns whether an element ended."""
        ended = False
        for _ in range(_ROUNDS_A_STEP):
            if not self._round():
                break
            ended = True
            if not (self._waiting and self._going):
                break
        return ended

    def _round(self) -> bool:
        if self._contact is not None and self._contact[0].done():
            future, landings = self._contact
            self._contact = None
            self._took(future.result(), landings)
        if self._going and self._contact is None:
            room = min(self.peer.room(len(self._outstanding)), len(self._waiting))
            if room:
                self._hand_in([self._waiting.popleft() for _ in range(room)])
        return self._collect()

    def raise_error(self) -> None:
        """Raises what `landed` raised."""
        for report in self._reports:
            report.result()
        if self.error is not None:
            raise self.error

    def _hand_in(self, wave: Sequence[tuple[ReadOp, _Landing]]) -> None:
        """The first contact blocks, so it is made in another thread."""
        self.peer.n_elements += len(wave)
        call = self._call([op for op, _ in wave])
        landings = [landing for _, landing in wave]
        if self.peer.reached:
            self._took(call(), landings)
        else:
            self._contact = self._calls.submit(call), landings

    def _took(self, ids: Sequence[int], landings: Sequence[_Landing]) -> None:
        """The engine took as many elements as there are ids."""
        self.peer.n_elements -= len(landings) - len(ids)
        self.failed |= len(ids) < len(landings)
        self._outstanding.update(zip(ids, landings, strict=False))

    def _call(self, ops: Sequence[ReadOp]) -> Callable[[], list[int]]:
        engine, peer, keep_alive = self._engine, self.peer, self._keep_alive

        def call() -> list[int]:
            ids: list[int] = []
            assert keep_alive  # the buffers outlive this call, whatever closes meanwhile
            for op in ops:
                try:
                    found = engine.batch_transfer_async_read(
                        peer.addresses, [op.local_address], [op.remote_address], [op.n_bytes]
                    )
                except Exception:  # the elements before it are under way all the same
                    log.exception("the engine does not take a read from %s", peer.engine_address)
                    break
                if not 0 < found < 1 << 63:  # 0 or -1: refused
                    break
                ids.append(found)
            return ids

        return call

    def _collect(self) -> bool:
        """Poll the elements, oldest first; returns whether one has ended."""
        self._looks += 1
        ended: list[tuple[int, int]] = []
        for element in self._outstanding:
            rail = -1 if self.peer.reached else self._engine.rail_of(element)
            status = self._engine.transfer_check_status(element)
            if status == _DONE and rail >= 0:
                self.peer.met.add(rail)
            if status in (_DONE, _FAILED):
                ended.append((element, status))
            elif self._looks % _THOROUGH_LOOKS:
                break  # those behind it take as long; and each look may wait for the interpreter
        for element, status in ended:
            landing = self._outstanding.pop(element)
            self.peer.n_elements -= 1
            if status == _FAILED:
                self.failed = True
                continue
            self.n_done += 1
            landing.n_elements -= 1
            if landing.n_elements == 0 and self._landed is not None:
                self._tell(self._landed, landing.op)
        return bool(ended)

    def _tell(self, landed: Landed, op: ReadOp) -> None:
        if op.n_bytes > _LANDED_INLINE_BYTES:
            self._reports.append(self._calls.submit(landed, op))
            return
        try:
            landed(op)
        except Exception as error:  # the engine still writes: it is raised when that has ended
            self.error = error


def split_reads(reads: Sequence[ReadOp], max_bytes: int) -> Iterator[ReadOp]:
    """The same bytes in pieces of at most `max_bytes`."""
    for op in reads:
        for start in range(0, op.n_bytes, max_bytes):
            n_bytes = min(max_bytes, op.n_bytes - start)
            yield ReadOp(op.local_address + start, op.remote_address + start, n_bytes)

"""One read by Mooncake's engine: elements handed in within the peer's bound, polled, told of as they end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

from libs.common.transport.base import Landed, ReadOp, TransferRefused
from libs.common.transport.beacon import NONCE_BYTES, BeaconAddress, greet

# Connections to one peer, and the most elements that the engine holds for it at any time.
LANES = 8
READS_PER_PEER = 2
# Large enough that a few keep the wire busy between polls, small enough to stop soon after a cancel.
ELEMENT_BYTES = 2 << 20
# xxh3 takes 50 to 250 us for so much: less than a thread's hand-over costs on a busy machine.
_LANDED_INLINE_BYTES = 2 << 20
_DONE, _FAILED = 1, -1
_POLL_MIN_S = 0.0001
# While the wire is busy the next element ends within a millisecond; a peer that stalls is asked seldom.
_POLL_BUSY_S = 0.0004
_POLL_MAX_S = 0.005
_BUSY_POLLS = 50


class MooncakePeer:
    """One incarnation of a peer: whether it was seen alive, and what the engine holds for it.

    A read alone may use all lanes; several share them evenly.
    """

    def __init__(self, session_id: str) -> None:
        try:
            self.engine_address, beacon_port, nonce = session_id.split("/")
            host, port = self.engine_address.rsplit(":", 1)
            self.beacon = BeaconAddress(host, int(beacon_port), bytes.fromhex(nonce))
            valid = 0 < int(port) < 65536 and len(self.beacon.nonce) == NONCE_BYTES
        except ValueError:
            valid = False
        if not valid:
            raise TransferRefused("not a session id of the mooncake transport")
        self.slots = asyncio.Semaphore(READS_PER_PEER)
        self.seen_alive = False
        self.reached = False  # the engine has moved bytes from there since the last failure
        self.n_readers = 0
        self.n_elements = 0

    def room(self, own_elements: int) -> int:
        """How many more elements a read that has `own_elements` outstanding may hand in."""
        fair = LANES // max(1, self.n_readers) - own_elements
        return max(0, min(fair, LANES - self.n_elements))

    async def ensure_alive(self) -> None:
        """Ask the beacon at first contact and after each failure."""
        if not self.seen_alive:
            await greet(self.beacon)
            self.seen_alive = True

    async def explain_failure(self) -> None:
        """Raises what a failed element means: PeerGone, TransferTimeout or TransferRefused."""
        self.seen_alive = self.reached = False
        await greet(self.beacon)
        raise TransferRefused(f"{self.engine_address} lives but refused or dropped the read")


@dataclass(slots=True)
class _Landing:
    """A ReadOp and how many of its elements have not ended."""

    op: ReadOp
    n_elements: int


class MooncakeRead:
    """The elements of one read. Its `run` ends only when the engine holds none of them any more."""

    def __init__(
        self,
        engine: Any,
        calls: Executor,
        peer: MooncakePeer,
        reads: Sequence[ReadOp],
        landed: Landed | None,
        keep_alive: object,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._peer = peer
        self._landed = landed
        self._keep_alive = keep_alive
        self._waiting: deque[tuple[ReadOp, _Landing]] = deque()
        for op in reads:
            landing = _Landing(op, -(-op.n_bytes // ELEMENT_BYTES))
            self._waiting.extend((piece, landing) for piece in split_reads([op], ELEMENT_BYTES))
        self._outstanding: dict[int, _Landing] = {}
        self._verifying: list[asyncio.Future[None]] = []
        self._failed = False
        self._error: Exception | None = None

    async def run(self, stop: asyncio.Event) -> bool:
        """Returns whether all landed; False when the engine failed an element or `stop` came first.
        Raises what `landed` raised.
        """
        peer = self._peer
        peer.n_readers += 1
        try:
            await self._move(stop)
        finally:
            peer.n_readers -= 1
        if self._verifying:
            await asyncio.gather(*self._verifying)
        if self._error is not None:
            raise self._error
        peer.reached = not self._failed and not self._waiting
        return peer.reached

    @property
    def failed(self) -> bool:
        """Whether the engine failed an element."""
        return self._failed

    async def _move(self, stop: asyncio.Event) -> None:
        sleep_s, in_vain = _POLL_MIN_S, 0
        while self._waiting or self._outstanding:
            going = not (self._failed or self._error or stop.is_set())
            if not going and not self._outstanding:
                return
            if going and (room := min(self._peer.room(len(self._outstanding)), len(self._waiting))):
                await self._submit([self._waiting.popleft() for _ in range(room)])
            ended = self._collect()
            in_vain = 0 if ended else in_vain + 1
            longest_s = _POLL_BUSY_S if in_vain < _BUSY_POLLS else _POLL_MAX_S
            sleep_s = _POLL_MIN_S if ended else min(sleep_s * 2, longest_s)
            if not (ended and self._waiting) and (self._waiting or self._outstanding):
                await asyncio.sleep(sleep_s)

    async def _submit(self, wave: Sequence[tuple[ReadOp, _Landing]]) -> None:
        """Hand elements to the engine, as many as it takes; in a thread at first contact, which blocks."""
        self._peer.n_elements += len(wave)  # before the thread has its turn
        call = self._submitter([op for op, _ in wave])
        if self._peer.reached:
            ids = call()
        else:
            ids = await asyncio.get_running_loop().run_in_executor(self._calls, call)
        self._peer.n_elements -= len(wave) - len(ids)
        self._failed |= len(ids) < len(wave)
        self._outstanding.update((element, landing) for element, (_, landing) in zip(ids, wave, strict=False))

    def _submitter(self, ops: Sequence[ReadOp]) -> Callable[[], list[int]]:
        engine, address, keep_alive = self._engine, self._peer.engine_address, self._keep_alive

        def call() -> list[int]:
            ids: list[int] = []
            assert keep_alive  # the buffers outlive this call, whatever closes meanwhile
            for op in ops:
                found = engine.batch_transfer_async_read(
                    address, [op.local_address], [op.remote_address], [op.n_bytes]
                )
                if not 0 < found < 1 << 63:  # 0 or -1: refused
                    break
                ids.append(found)
            return ids

        return call

    def _collect(self) -> bool:
        """Look at every element once; returns whether one has ended."""
        check = self._engine.transfer_check_status
        statuses = [(element, check(element)) for element in self._outstanding]
        ended = [(element, status) for element, status in statuses if status in (_DONE, _FAILED)]
        for element, status in ended:
            landing = self._outstanding.pop(element)
            self._peer.n_elements -= 1
            if status == _FAILED:
                self._failed = True
                continue
            landing.n_elements -= 1
            if landing.n_elements == 0 and self._landed is not None:
                self._tell(self._landed, landing.op)
        return bool(ended)

    def _tell(self, landed: Landed, op: ReadOp) -> None:
        if op.n_bytes > _LANDED_INLINE_BYTES:
            loop = asyncio.get_running_loop()
            self._verifying.append(loop.run_in_executor(self._calls, landed, op))
            return
        try:
            landed(op)
        except Exception as error:  # the engine still writes: it is raised when that has ended
            self._error = error


def split_reads(reads: Sequence[ReadOp], max_bytes: int) -> Iterator[ReadOp]:
    """The same bytes in pieces of at most `max_bytes`."""
    for op in reads:
        for start in range(0, op.n_bytes, max_bytes):
            n_bytes = min(max_bytes, op.n_bytes - start)
            yield ReadOp(op.local_address + start, op.remote_address + start, n_bytes)

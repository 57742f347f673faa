"""The thread that drives all reads of one Mooncake transport: it submits, polls, and reports landed blocks.

The event loop's timers are too coarse for this: each poll would lose up to a millisecond, a tenth of a read
of 16 MiB. The thread also verifies landed blocks without blocking the loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading

from libs.common.transport.mooncake_read import MooncakeRead

log = logging.getLogger(__name__)

_POLL_MIN_S = 0.00015
# While bytes arrive the next element ends within a millisecond; the polls of a stalled peer are rarer.
_POLL_BUSY_S = 0.0004
_POLL_MAX_S = 0.005
_BUSY_POLLS = 60


class ReadPoller:
    """The polling thread, which sleeps while there are no reads."""

    def __init__(self) -> None:
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._arrived: list[tuple[MooncakeRead, asyncio.Future[None]]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-poller", daemon=True)
        self._thread.start()

    async def run(self, read: MooncakeRead) -> None:
        """Return when the read is over. A cancel does not end it, because only the engine can."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._arrived.append((read, over))
        self._wake.set()
        await over

    def close(self) -> None:
        """End the thread, even with outstanding reads. Idempotent."""
        self._closed = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        active: list[tuple[MooncakeRead, asyncio.Future[None]]] = []
        sleep_s, n_idle = _POLL_MIN_S, 0  # polls in a row in which no element ended
        while not self._closed:
            if self._wake.wait(sleep_s if active else None):
                self._wake.clear()
                with self._lock:
                    arrived, self._arrived = self._arrived, []
                for read, _ in arrived:
                    read.peer.n_readers += 1
                active += arrived
                n_idle = 0
            ended = False
            for read, _ in active:
                ended |= _step(read)
            n_idle = 0 if ended else n_idle + 1
            longest_s = _POLL_BUSY_S if n_idle < _BUSY_POLLS else _POLL_MAX_S
            sleep_s = _POLL_MIN_S if n_idle == 0 else min(sleep_s * 2, longest_s)
            for read, over in [each for each in active if each[0].over]:
                active.remove((read, over))
                read.peer.n_readers -= 1
                read.peer.reached = read.reached
                over.get_loop().call_soon_threadsafe(_resolve, over)


def _step(read: MooncakeRead) -> bool:
    try:
        return read.step()
    except Exception:  # a defect: the read never ends, so its destination stays quarantined
        log.exception("a step of a read failed")
        read.failed = True
        return False


def _resolve(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)

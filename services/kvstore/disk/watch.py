"""Watch of one disk: detects hanging and late calls, and probes a failed disk until it is OK.

`disk/health.py` derives the disk's state. The watch has the timer, which ticks while calls run or the disk is
not OK, the probes, and the log lines. There is one when the disk fails, and one when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from services.kvstore.disk.health import READ_HANGS_AFTER_S, DiskHealth, DiskState
from slipstream.errors import FailedPrecondition

log = logging.getLogger(__name__)

TICK_S = 0.1


class WatchedDisk(Protocol):
    """The part of a disk tier that the watch uses."""

    @property
    def busy(self) -> bool:
        """Whether calls run or wait."""

    @property
    def can_reclaim(self) -> bool:
        """Whether a probe of a healthy disk would reclaim segments."""

    def running_since_s(self) -> tuple[float | None, float | None]:
        """When the oldest running read and write began."""

    def cancel_waiting(self) -> None:
        """Cancel queued calls."""

    def state_changed(self) -> None:
        """Handle that the disk's health has another state."""

    async def probe(self) -> None:
        """Probe the disk. Raises OSError or FailedPrecondition while it fails."""


class DiskListener(Protocol):
    """Learns of a disk's changes; called on the event loop."""

    def disk_changed(self) -> None:
        """A disk has another state of health."""

    def blocks_lost(self, keys: Sequence[bytes]) -> None:
        """A disk lost these blocks."""


class DiskWatch:
    """The watch over one disk. Event loop only, but for `open_failed`."""

    def __init__(
        self,
        name: str,
        health: DiskHealth,
        disk: WatchedDisk,
        *,
        clock_s: Callable[[], float],
    ) -> None:
        self.health = health
        self._name = name
        self._disk = disk
        self._clock_s = clock_s
        self._ticking: asyncio.TimerHandle | None = None
        self._tick_due_s = 0.0
        self._probing: asyncio.Task[None] | None = None
        self._closed = False
        self.io_errors = 0

    def open_failed(self, error: OSError) -> None:
        """Mark the disk as unavailable until a probe opens it."""
        log.error("disk tier: %s cannot be read, going on without it: %s", self._name, error)
        self.health.mark_unavailable(now_s=self._clock_s())

    def open_hangs(self, opening: Awaitable[None]) -> None:
        """Mark the disk as unavailable until `opening` and a probe after it succeed."""
        log.error("disk tier: %s does not answer, going on without it until it does", self._name)
        self.health.mark_unavailable(now_s=self._clock_s())
        self._probing = asyncio.create_task(self._probe(opening))

    def record_read(self) -> None:
        """Record a completed read, whole or damaged."""
        self.health.record_read(failed=False, now_s=0.0)

    def record_error(self, what: str, error: BaseException) -> None:
        """Record a failed "read" or "write"."""
        self.io_errors += 1
        before = self.health.state
        if what == "read":
            self.health.record_read(failed=True, now_s=self._clock_s())
        else:
            self.health.record_write_failure(now_s=self._clock_s())
        self._state_may_have_changed(before, f"a {what} failed: {error}")
        self.schedule_tick()

    def record_late(self) -> None:
        """Record that a reader timed out before any of its reads completed."""
        before = self.health.state
        self.health.record_late(now_s=self._clock_s())
        self._state_may_have_changed(before, "it is too slow")
        self.schedule_tick()

    def schedule_tick(self) -> None:
        """Schedule the next tick; needs a running loop."""
        if self._ticking is None and not self._closed:
            self._tick_due_s = self._clock_s() + TICK_S
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def close(self) -> None:
        """Stop ticking."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()

    def _state_may_have_changed(self, before: DiskState, why: str) -> None:
        if self.health.state == before:
            return
        log.error("disk tier: %s is %s: %s", self._name, self.health.state.name, why)
        if self.health.state == DiskState.UNAVAILABLE:
            self._disk.cancel_waiting()
        self._disk.state_changed()

    def _tick(self) -> None:
        self._ticking = None
        before, now_s = self.health.state, self._clock_s()
        if now_s < self._tick_due_s + TICK_S:  # else this process lacked CPU time, not the disk
            read_s, write_s = self._disk.running_since_s()
            self.health.check_running_calls(read_s=read_s, write_s=write_s, now_s=now_s)
            self._state_may_have_changed(before, "a call does not return")
        can_reclaim = self.health.state == DiskState.OK and self._disk.can_reclaim
        if self.health.probe_is_due(now_s=now_s, wanted=can_reclaim) and self._probing is None:
            self._probing = asyncio.create_task(self._probe())
        if self.health.state != DiskState.OK or self._disk.busy or self._disk.can_reclaim:
            self.schedule_tick()

    async def _probe(self, opening: Awaitable[None] | None = None) -> None:
        succeeded, begun_s = True, self._clock_s()
        try:
            if opening is not None:
                await opening
                begun_s = self._clock_s()  # a late opening says nothing about the disk's speed now
            await self._disk.probe()
        except (OSError, FailedPrecondition) as error:
            succeeded = False
            log.debug("disk tier: %s is still %s: %s", self._name, self.health.state.name, error)
        except Exception:
            succeeded = False
            log.exception("disk tier: the probe of %s failed", self._name)
        finally:
            self._probing = None
        now_s = self._clock_s()
        hanging = any(
            since is not None and now_s - since > READ_HANGS_AFTER_S for since in self._disk.running_since_s()
        )
        before = self.health.state  # a call may have failed since the probe began
        self.health.record_probe(succeeded=succeeded, hanging=hanging, now_s=now_s, took_s=now_s - begun_s)
        if self.health.state == DiskState.OK and before != DiskState.OK:
            log.warning("disk tier: %s is back", self._name)
            self._disk.state_changed()

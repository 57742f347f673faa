"""Looks after one disk: calls that hang, a disk that is slow, probes until it is well again.

What the disk is good for says `disk/health.py`; here are the clock that ticks while anything runs or is
not well, the probes, and the log lines: one when the disk fails, one when it is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from services.kvstore.disk.health import READ_HANGS_AFTER_S, DiskHealth, DiskState
from slipstream.errors import FailedPrecondition

log = logging.getLogger(__name__)

TICK_S = 0.1


class Watched(Protocol):
    """What the watch asks of its disk."""

    @property
    def busy(self) -> bool:
        """Whether calls run or wait."""

    @property
    def reclaims(self) -> bool:
        """Whether a probe would do something for a disk that is well."""

    def running_since_s(self) -> tuple[float | None, float | None]:
        """When the oldest running read and write began."""

    def give_up_waiting(self) -> None:
        """End what has not begun."""


class DiskWatch:
    """The watch over one disk. Event loop only, but for `open_failed`."""

    def __init__(
        self,
        name: str,
        health: DiskHealth,
        disk: Watched,
        *,
        probe: Callable[[], Awaitable[None]],
        clock_s: Callable[[], float],
    ) -> None:
        """`probe` raises OSError or FailedPrecondition while the disk does not do what it should."""
        self.health = health
        self._name = name
        self._disk = disk
        self._probe_disk = probe
        self._clock_s = clock_s
        self._ticking: asyncio.TimerHandle | None = None
        self._tick_due_s = 0.0
        self._probing: asyncio.Task[None] | None = None
        self._closed = False
        self.io_errors = 0
        self.on_away: Callable[[], None] = lambda: None
        self.on_state: Callable[[], None] = lambda: None  # the state is another one

    def open_failed(self, error: OSError) -> None:
        """The disk could not be opened: it is away until a probe opens it."""
        log.error("disk tier: %s cannot be read, going on without it: %s", self._name, error)
        self.health.gone(now_s=self._clock_s())

    def open_hangs(self, opening: Awaitable[None]) -> None:
        """The disk does not answer: it is away until `opening` ends well and a probe after it."""
        log.error("disk tier: %s does not answer, going on without it until it does", self._name)
        self.health.gone(now_s=self._clock_s())
        self._probing = asyncio.create_task(self._probe(opening))

    def read_ended(self) -> None:
        """A read was answered, whatever with."""
        self.health.read_ended(failed=False, now_s=0.0)

    def failed(self, what: str, error: BaseException) -> None:
        """A "read" or a "write" failed."""
        self.io_errors += 1
        before = self.health.state
        if what == "read":
            self.health.read_ended(failed=True, now_s=self._clock_s())
        else:
            self.health.write_failed(now_s=self._clock_s())
        self._state_may_have_changed(before, f"a {what} failed: {error}")
        self.keep_ticking()

    def was_late(self) -> None:
        """Somebody waited for reads until his time was over, and not one of them had ended."""
        before = self.health.state
        self.health.reads_late(now_s=self._clock_s())
        self._state_may_have_changed(before, "it is too slow")
        self.keep_ticking()

    def keep_ticking(self) -> None:
        """Look again soon; needs a running loop."""
        if self._ticking is None and not self._closed:
            self._tick_due_s = self._clock_s() + TICK_S
            self._ticking = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def close(self) -> None:
        """Stop looking."""
        self._closed = True
        if self._ticking is not None:
            self._ticking.cancel()

    def _state_may_have_changed(self, before: DiskState, why: str) -> None:
        if self.health.state == before:
            return
        log.error("disk tier: %s is %s: %s", self._name, self.health.state.name, why)
        self.on_state()
        if self.health.state == DiskState.AWAY:
            self._disk.give_up_waiting()
            self.on_away()

    def _tick(self) -> None:
        self._ticking = None
        before, now_s = self.health.state, self._clock_s()
        if now_s < self._tick_due_s + TICK_S:  # else this process gets no time, and the disk may be well
            read_s, write_s = self._disk.running_since_s()
            self.health.calls_run_since(read_s=read_s, write_s=write_s, now_s=now_s)
            self._state_may_have_changed(before, "a call does not return")
        reclaims = self.health.state == DiskState.OK and self._disk.reclaims
        if self.health.probe_is_due(now_s=now_s, wanted=reclaims) and self._probing is None:
            self._probing = asyncio.create_task(self._probe())
        if self.health.state != DiskState.OK or self._disk.busy or self._disk.reclaims:
            self.keep_ticking()

    async def _probe(self, opening: Awaitable[None] | None = None) -> None:
        before, succeeded, begun_s = self.health.state, True, self._clock_s()
        try:
            if opening is not None:
                await opening
                begun_s = self._clock_s()  # how long it took to answer says nothing of how it answers now
            await self._probe_disk()
        except (OSError, FailedPrecondition) as error:
            succeeded = False
            log.debug("disk tier: %s is still %s: %s", self._name, before.name, error)
        except Exception:
            succeeded = False
            log.exception("disk tier: the probe of %s failed", self._name)
        finally:
            self._probing = None
        now_s = self._clock_s()
        hanging = any(
            since is not None and now_s - since > READ_HANGS_AFTER_S for since in self._disk.running_since_s()
        )
        self.health.probed(succeeded=succeeded, hanging=hanging, now_s=now_s, took_s=now_s - begun_s)
        if self.health.state == DiskState.OK and before != DiskState.OK:
            log.warning("disk tier: %s is back", self._name)
            self.on_state()

"""What a disk is good for now, from how its calls end. Pure; time is given, in seconds.

    OK         takes and gives blocks
    READ_ONLY  a write failed or does not end: gives blocks, takes none
    AWAY       reads fail one after the other, come too late or hang: its blocks are misses until it is back

A disk that is not OK is probed, less and less often; a probe that writes, syncs and reads back in
reasonable time while nothing hangs makes it OK again.
"""

from __future__ import annotations

import enum

READ_HANGS_AFTER_S = 0.5
WRITE_HANGS_AFTER_S = 5.0
AWAY_AFTER_READ_ERRORS = 3
# Readers in a row whose time was over before a single read had ended.
AWAY_AFTER_LATE = 2
# A probe is five calls; on a disk that needs longer for them, reads come too late as well.
SLOW_PROBE_S = 1.0
FIRST_PROBE_S = 0.5
MAX_PROBE_S = 30.0
# A disk that is well, but has no room for a probe, is asked again after that.
FULL_PROBE_S = 5.0


class DiskState(enum.IntEnum):
    """In order of harm."""

    OK = 0
    READ_ONLY = 1
    AWAY = 2


class DiskHealth:
    """The state of one disk."""

    def __init__(self, *, first_probe_s: float = FIRST_PROBE_S) -> None:
        self.state = DiskState.OK
        self._first_probe_s = first_probe_s
        self._probe_after_s = first_probe_s
        self._probe_at_s = 0.0
        self._read_errors = 0
        self._late = 0

    def read_ended(self, *, failed: bool, now_s: float) -> None:
        """One read returned. Single errors are bad spots; a row of them is a bad disk."""
        self._late = 0
        self._read_errors = self._read_errors + 1 if failed else 0
        if self._read_errors >= AWAY_AFTER_READ_ERRORS:
            self._worsen(DiskState.AWAY, now_s)

    def reads_late(self, *, now_s: float) -> None:
        """A reader's time was over, and no read had ended since it asked."""
        self._late += 1
        if self._late >= AWAY_AFTER_LATE:
            self._worsen(DiskState.AWAY, now_s)

    def gone(self, *, now_s: float) -> None:
        """It could not even be opened."""
        self._worsen(DiskState.AWAY, now_s)

    def write_failed(self, *, now_s: float) -> None:
        """A write or a sync failed, for another reason than a full disk."""
        self._worsen(DiskState.READ_ONLY, now_s)

    def calls_run_since(self, *, read_s: float | None, write_s: float | None, now_s: float) -> None:
        """Since when the oldest running read and write run; None when none runs."""
        if read_s is not None and now_s - read_s > READ_HANGS_AFTER_S:
            self._worsen(DiskState.AWAY, now_s)
        if write_s is not None and now_s - write_s > WRITE_HANGS_AFTER_S:
            self._worsen(DiskState.READ_ONLY, now_s)

    def probe_is_due(self, *, now_s: float, wanted: bool = False) -> bool:
        """Whether to probe now; a disk that is well only when that is `wanted`."""
        return (wanted or self.state != DiskState.OK) and now_s >= self._probe_at_s

    def probed(self, *, succeeded: bool, hanging: bool, now_s: float, took_s: float = 0.0) -> None:
        """A probe ended, after `took_s`. `hanging`: some other call still does not return."""
        if succeeded and not hanging and took_s <= SLOW_PROBE_S:
            self.state = DiskState.OK
            self._read_errors = self._late = 0
            self._probe_after_s = self._first_probe_s
            return
        if self.state == DiskState.OK:
            self._probe_at_s = now_s + FULL_PROBE_S
            return
        self._probe_after_s = min(MAX_PROBE_S, 2 * self._probe_after_s)
        self._probe_at_s = now_s + self._probe_after_s

    def _worsen(self, state: DiskState, now_s: float) -> None:
        if self.state == DiskState.OK:
            self._probe_at_s = now_s + self._probe_after_s
        self.state = max(self.state, state)

"""Health of a disk, derived from the results of its calls. Pure; the caller passes the time, in seconds.

    OK           readable and writable
    READ_ONLY    a write failed or hangs: the disk serves reads and takes no blocks
    UNAVAILABLE  successive reads fail, are late or hang: the disk's blocks are misses until it is back

A disk that is not OK is probed with back-off. A probe that writes, syncs and reads back in time, while no
call hangs, makes it OK again.
"""

from __future__ import annotations

import enum

READ_HANGS_AFTER_S = 0.5
WRITE_HANGS_AFTER_S = 5.0
UNAVAILABLE_AFTER_READ_ERRORS = 3
# Successive readers that timed out without a single completed read.
UNAVAILABLE_AFTER_LATE = 2
# A probe makes five calls. On a disk that needs longer for them, reads are late too.
SLOW_PROBE_S = 1.0
FIRST_PROBE_S = 0.5
MAX_PROBE_S = 30.0
# Retry time of a probe on a healthy disk that has no room for it.
FULL_PROBE_S = 5.0


class DiskState(enum.IntEnum):
    """Ordered by severity."""

    OK = 0
    READ_ONLY = 1
    UNAVAILABLE = 2


class DiskHealth:
    """The state of one disk."""

    def __init__(self, *, first_probe_s: float = FIRST_PROBE_S) -> None:
        self.state = DiskState.OK
        self._first_probe_s = first_probe_s
        self._probe_after_s = first_probe_s
        self._probe_at_s = 0.0
        self._read_errors = 0
        self._late = 0

    def record_read(self, *, failed: bool, now_s: float) -> None:
        """Record a completed read. Single errors are bad sectors; several in a row are a bad disk."""
        self._late = 0
        self._read_errors = self._read_errors + 1 if failed else 0
        if self._read_errors >= UNAVAILABLE_AFTER_READ_ERRORS:
            self._worsen(DiskState.UNAVAILABLE, now_s)

    def record_late(self, *, now_s: float) -> None:
        """Record that a reader timed out before any read completed."""
        self._late += 1
        if self._late >= UNAVAILABLE_AFTER_LATE:
            self._worsen(DiskState.UNAVAILABLE, now_s)

    def mark_unavailable(self, *, now_s: float) -> None:
        """Record that the disk could not be opened."""
        self._worsen(DiskState.UNAVAILABLE, now_s)

    def record_write_failure(self, *, now_s: float) -> None:
        """Record that a write or a sync failed for another reason than a full disk."""
        self._worsen(DiskState.READ_ONLY, now_s)

    def check_running_calls(self, *, read_s: float | None, write_s: float | None, now_s: float) -> None:
        """Check for hanging calls. `read_s`, `write_s`: starts of the oldest running ones, or None."""
        if read_s is not None and now_s - read_s > READ_HANGS_AFTER_S:
            self._worsen(DiskState.UNAVAILABLE, now_s)
        if write_s is not None and now_s - write_s > WRITE_HANGS_AFTER_S:
            self._worsen(DiskState.READ_ONLY, now_s)

    def probe_is_due(self, *, now_s: float, wanted: bool = False) -> bool:
        """Whether to probe now; a healthy disk is probed only if `wanted`."""
        return (wanted or self.state != DiskState.OK) and now_s >= self._probe_at_s

    def record_probe(self, *, succeeded: bool, hanging: bool, now_s: float, took_s: float = 0.0) -> None:
        """Record the result of a probe that took `took_s`. `hanging`: another call still does not return."""
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

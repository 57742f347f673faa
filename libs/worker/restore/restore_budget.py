"""Bounds how long a worker tries to restore a prompt's prefix before it computes instead. Pure.

One bound covers all sources together. S is the time spent, R the time to compute all wanted blocks, and G the
time to compute the blocks restored so far. A restore continues while

    S <= max(floor, WAIT_PART * R) + G

So its net cost, S - G, never exceeds the larger of the floor and WAIT_PART * R. Sources that deliver nothing
delay the first token by at most WAIT_PART. A source that delivers faster than this worker computes may
continue for as long as it does.
"""

from __future__ import annotations

from collections.abc import Callable

# The first token should come within 1.2 times the compute time; 0.02 of it is for work besides the restore.
WAIT_PART = 0.18
# A working source answers in a few milliseconds, or more on a machine with more processes than cores.
FLOOR_MS = 50.0
# Before this worker has computed a prompt, its compute time is unknown. Then the bound is UNKNOWN_RATE_MS,
# and a source that delivers a hundred blocks per second may continue.
UNKNOWN_RATE_MS = 250.0
UNKNOWN_BLOCK_MS = 10.0
# The share of the remaining time for a source while another source follows.
_SHARE = 0.5
# The share of a source's time for its disks; the transfer of the blocks needs the remaining time.
_DISK_SHARE = 0.75
DISK_WAIT_PART = 0.15
MIN_DISK_WAIT_MS = 10  # for the default floor; it scales with the floor
FIRST_DISK_WAIT_MS = 100.0


class RestoreBudget:
    """The time of one prompt's restore, in milliseconds of `clock_ms`."""

    def __init__(
        self,
        *,
        n_blocks: int,
        block_ms: float,
        clock_ms: Callable[[], float],
        floor_ms: float = FLOOR_MS,
    ) -> None:
        """`block_ms`: the time to compute each of the `n_blocks` wanted blocks, 0 when unknown."""
        self.recompute_ms = n_blocks * max(0.0, block_ms)
        self.bound_ms = max(floor_ms, WAIT_PART * self.recompute_ms)
        if block_ms <= 0:
            self.bound_ms = max(floor_ms, UNKNOWN_RATE_MS)
        self._disk_floor_ms = MIN_DISK_WAIT_MS * floor_ms / FLOOR_MS
        self.gained_ms = 0.0
        self._block_ms = block_ms if block_ms > 0 else UNKNOWN_BLOCK_MS
        self._clock_ms = clock_ms
        self._began_ms = clock_ms()
        self._source_ends_ms = self._began_ms + self.bound_ms

    @property
    def spent_ms(self) -> float:
        """The time since the budget was made."""
        return self._clock_ms() - self._began_ms

    @property
    def cost_ms(self) -> float:
        """The net cost so far: the time spent less the compute time saved. Negative when it saves time."""
        return self.spent_ms - self.gained_ms

    @property
    def left_ms(self) -> float:
        """The time left for the current source, at least 0."""
        return max(0.0, self._source_ends_ms + self.gained_ms - self._clock_ms())

    def next_source(self, *, n_after: int) -> bool:
        """Give the next source its share, with `n_after` further sources.

        Returns False if no time is left.
        """
        left_ms = self._began_ms + self.bound_ms + self.gained_ms - self._clock_ms()
        if left_ms <= 0:
            self._source_ends_ms = self._clock_ms() - self.gained_ms
            return False
        share = _SHARE if n_after else 1.0
        self._source_ends_ms = self._clock_ms() + share * left_ms - self.gained_ms
        return True

    def add_restored(self, n_blocks: int) -> None:
        """Add the compute time that further verified blocks save."""
        self.gained_ms += n_blocks * self._block_ms

    @property
    def disk_wait_ms(self) -> int:
        """How long the source may wait for its disks."""
        part_ms = DISK_WAIT_PART * self.recompute_ms if self.recompute_ms else FIRST_DISK_WAIT_MS
        return max(MIN_DISK_WAIT_MS, int(min(_DISK_SHARE * self.left_ms, max(part_ms, self._disk_floor_ms))))

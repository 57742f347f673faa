"""How long a worker tries to restore a prompt's prefix before it computes instead. Pure; clocks are given.

One bound for all sources together. With S the time spent, R what computing all wanted blocks would take, and
G what computing the blocks would have taken that came already, a restore goes on while

    S <= max(floor, PART * R) + G

so what it costs beyond computing, S - G, is at most the larger of the floor and that part of R, whatever the
sources do: with sources that give nothing the first token comes at most PART later than without them, and one
that delivers faster than this worker computes may go on for as long as it does.
"""

from __future__ import annotations

from collections.abc import Callable

# The aim is a first token within 1.2 times of computing; the rest is for what runs beside a restore.
WAIT_PART = 0.18
# A working source answers in a few milliseconds; on a machine with more processes than cores in some more.
FLOOR_MS = 50.0
# Before this worker has computed anything it cannot tell what computing would take: a source that gives
# nothing costs so much, and one that gives a hundred blocks a second may go on.
UNKNOWN_RATE_MS = 250.0
UNKNOWN_BLOCK_MS = 10.0
# What one source may take of the bound while another one is still to be asked.
_SHARE = 0.5
# Of a source's time, the part that its disks get: what comes from them has to be read as well.
_DISK_SHARE = 0.75
DISK_WAIT_PART = 0.15
MIN_DISK_WAIT_MS = 10  # with the floor as it is here
FIRST_DISK_WAIT_MS = 100.0


class RestoreBudget:
    """The time that one prompt's restore has. All in milliseconds of `clock_ms`."""

    def __init__(
        self,
        *,
        n_blocks: int,
        block_ms: float,
        clock_ms: Callable[[], float],
        floor_ms: float = FLOOR_MS,
    ) -> None:
        """`n_blocks` are wanted, each of which takes `block_ms` to compute, 0 when that is not known."""
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
        """Since it began."""
        return self._clock_ms() - self._began_ms

    @property
    def cost_ms(self) -> float:
        """What the restore costs so far beyond computing; negative when it saves."""
        return self.spent_ms - self.gained_ms

    @property
    def left_ms(self) -> float:
        """What the source in turn has left; 0 when the time is over."""
        return max(0.0, self._source_ends_ms + self.gained_ms - self._clock_ms())

    def next_source(self, *, n_after: int) -> bool:
        """Another source is asked now, and `n_after` may be after it; whether there is time for it."""
        left_ms = self._began_ms + self.bound_ms + self.gained_ms - self._clock_ms()
        if left_ms <= 0:
            self._source_ends_ms = self._clock_ms() - self.gained_ms
            return False
        share = _SHARE if n_after else 1.0
        self._source_ends_ms = self._clock_ms() + share * left_ms - self.gained_ms
        return True

    def came(self, n_blocks: int) -> None:
        """So many blocks more have landed and are right."""
        self.gained_ms += n_blocks * self._block_ms

    @property
    def disk_wait_ms(self) -> int:
        """How long the source may wait for its disks: no floor but its own, as nothing lies between them."""
        part_ms = DISK_WAIT_PART * self.recompute_ms if self.recompute_ms else FIRST_DISK_WAIT_MS
        return max(MIN_DISK_WAIT_MS, int(min(_DISK_SHARE * self.left_ms, max(part_ms, self._disk_floor_ms))))

"""A day of traffic: a trace repeated, its rate following the hours. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bench.placement.trace import TraceRequest

DAY_MS = 86_400_000.0
NIGHT_SHARE = 0.15  # of the rate at noon
# A burst at 15 h: the rate doubles for a quarter of an hour.
BURST_FROM_MS, BURST_UNTIL_MS, BURST_FACTOR = 15.0 * 3.6e6, 15.25 * 3.6e6, 2.0
_STEP_MS = 60_000.0


def rate_at(time_ms: float) -> float:
    """The rate, in units of the rate at noon."""
    wave = 0.5 - 0.5 * math.cos(2 * math.pi * time_ms / DAY_MS)
    burst = BURST_FACTOR if BURST_FROM_MS <= time_ms % DAY_MS < BURST_UNTIL_MS else 1.0
    return (NIGHT_SHARE + (1 - NIGHT_SHARE) * wave) * burst


def day_of(trace: Sequence[TraceRequest], n_requests: int) -> Iterator[TraceRequest]:
    """So many requests over a day. Each repetition of the trace has its own sessions and blocks.

    The trace's own gaps, stretched to the day, are kept: its bursts stay bursts.
    """
    total = sum(rate_at(step * _STEP_MS) for step in range(int(DAY_MS / _STEP_MS)))
    length_ms = trace[-1].at_ms - trace[0].at_ms + 1.0
    whole_ms = length_ms * n_requests / len(trace)
    minute, passed = 0, 0.0  # `passed` of `total` until the minute
    for number in range(n_requests):
        cycle, index = divmod(number, len(trace))
        request = trace[index]
        # How much of the day's traffic comes before it.
        share = (cycle * length_ms + request.at_ms - trace[0].at_ms) / whole_ms * total
        while share >= passed + rate_at(minute * _STEP_MS) and minute * _STEP_MS < DAY_MS:
            passed += rate_at(minute * _STEP_MS)
            minute += 1
        at_ms = (minute + (share - passed) / rate_at(minute * _STEP_MS)) * _STEP_MS
        mark = cycle.to_bytes(2, "little")
        yield replace(
            request,
            number=number,
            at_ms=at_ms,
            hashes=tuple(mark + block for block in request.hashes),
            session=f"{cycle}/{request.session}",
        )

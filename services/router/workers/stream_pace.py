"""How much of the event loop one worker's stream of block events may take. Pure.

    pause_s = pace.spent(elapsed_s, now_s=now_s)      # after each message; read the next one after the pause

Time is what a message costs the router, whatever it holds. A worker joins the changes that wait, so that a
paused stream brings fewer and larger messages, or ends and begins again with a snapshot.
"""

from __future__ import annotations

from libs.common.fleet_bounds import BLOCK_EVENTS_BURST_S, BLOCK_EVENTS_SHARE

# What gRPC and asyncio take for a message, beside its blocks.
_READ_S = 200e-6


class StreamPace:
    """A token bucket in seconds of the event loop."""

    def __init__(self, *, now_s: float) -> None:
        self._left_s, self._at_s = BLOCK_EVENTS_BURST_S, now_s

    def spent(self, elapsed_s: float, *, now_s: float) -> float:
        """Take the cost of one message; returns the pause that it is due, 0 within the share."""
        refilled_s = self._left_s + max(now_s - self._at_s, 0.0) * BLOCK_EVENTS_SHARE
        self._left_s = min(refilled_s, BLOCK_EVENTS_BURST_S) - elapsed_s - _READ_S
        self._at_s = now_s
        return max(-self._left_s, 0.0) / BLOCK_EVENTS_SHARE

"""How long a retry loop waits before it tries a broken connection again. Pure.

Every reconnect, including back-off and time-outs, completes within HEAL_S after the fault is lifted. Just
before that, the retry loop may have begun a pause or sent a request that is lost; its channel may be in a
pause as well. So two sums stay below HEAL_S for every link:

    the longest pause of the loop  +  the longest pause of a channel (CHANNEL_PAUSE_MS plus a fifth)
    the longest pause of the loop  +  ANSWER_S, or another time-out for an answer that may be lost

Where a peer may only be slow, the loop asks again and keeps the earlier request open
(`services/router/workers/connection.py`).
"""

from __future__ import annotations

HEAL_S = 5.0
LONGEST_PAUSE_S = 2.0
ANSWER_S = 2.0
# gRPC's own, between two attempts to connect: the first one and the longest.
CHANNEL_PAUSE_MS = (100, 2_000)
# The client's ping detects a connection that the network dropped silently: it is sent after PING_S of silence
# and unanswered after PING_ANSWER_S.
PING_S = 1.5
PING_ANSWER_S = 3.0


class Backoff:
    """The pauses of one retry loop: `first_s` after a success, then doubled up to `longest_s`."""

    def __init__(self, *, first_s: float = 0.1, longest_s: float = LONGEST_PAUSE_S) -> None:
        if not 0 < first_s <= longest_s <= LONGEST_PAUSE_S:
            raise ValueError(f"pauses of {first_s:g} to {longest_s:g} s heal too late")
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def succeeded(self) -> None:
        """Record a success: the next pause is `first_s`."""
        self._next_s = self._first_s

    def pause_s(self, jitter: float = 1.0) -> float:
        """The next pause; `jitter` in [0, 1] scales it to between a half and the whole."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, self._longest_s)
        return pause_s * (0.5 + jitter / 2)

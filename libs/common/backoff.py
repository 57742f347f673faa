"""How long to wait before a broken connection is tried again. Pure.

After a fault is lifted a link must carry again within HEAL_S, whatever had failed before. In the instant
before it is lifted a retry may have begun to wait, or may have asked what is lost on its way; and the channel
under it may be in a wait of its own. So of every way back:

    the longest pause of the loop  +  the longest wait of a channel (CHANNEL_PAUSE_MS, a fifth longer at most)
    the longest pause of the loop  +  ANSWER_S, or whatever else the way waits for an answer that may be lost

stay below HEAL_S. Where a peer may only be slow, the question is asked again and the one before it is not
taken back (`services/router/workers/connection.py`).
"""

from __future__ import annotations

HEAL_S = 5.0
LONGEST_PAUSE_S = 2.0
ANSWER_S = 2.0
# gRPC's own, between two attempts to connect: the first one and the longest.
CHANNEL_PAUSE_MS = (100, 2_000)
CHANNEL_JITTER = 0.2
# A connection that the network forgot, of which nobody is told, is noticed by the ping of its dialler: after
# so long a silence, and so long a wait for its answer.
PING_S = 1.5
PING_ANSWER_S = 3.0


class Backoff:
    """The pauses of one retry loop: doubled each time, up to `longest_s`, from `first_s` after a success."""

    def __init__(self, *, first_s: float = 0.1, longest_s: float = LONGEST_PAUSE_S) -> None:
        if not 0 < first_s <= longest_s <= LONGEST_PAUSE_S:
            raise ValueError(f"pauses of {first_s:g} to {longest_s:g} s heal too late")
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def succeeded(self) -> None:
        """The connection carries."""
        self._next_s = self._first_s

    def pause_s(self, jitter: float = 1.0) -> float:
        """How long to wait now; `jitter` in [0, 1] takes up to half of it away."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, self._longest_s)
        return pause_s * (0.5 + jitter / 2)

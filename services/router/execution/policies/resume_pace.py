"""How long a request stays suspended at least, so that no client makes workers begin again and again. Pure.

A request leaves its workers when its client reads nothing, and goes on when the client reads. The workers
then compute again what no cache has. The least time doubles with each suspension, so that a request of ten
minutes goes on a few dozen times at most. A client that takes longer to read waits for nothing.
"""

from __future__ import annotations

from libs.common.service_bounds import RESUME_PAUSE_S


class ResumePace:
    """The suspensions of one request."""

    def __init__(self) -> None:
        self._least_s = RESUME_PAUSE_S[0]
        self._resumes_s = 0.0

    def suspended(self, now_s: float) -> None:
        """The request leaves its workers."""
        self._resumes_s = now_s + self._least_s
        self._least_s = min(2 * self._least_s, RESUME_PAUSE_S[1])

    def wait_s(self, now_s: float) -> float:
        """How long the request waits now that its client has read."""
        return max(0.0, self._resumes_s - now_s)

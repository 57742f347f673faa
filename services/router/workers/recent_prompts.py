"""The prompts that a decode worker was given to compute within the last second."""

from __future__ import annotations

from collections import deque

# A worker counts prompts between two steps: a report may lack what was sent so long before.
REPORT_DELAY_S = 1.0


class RecentPrompts:
    """Times and tokens of the prompts. Without them several requests that come between two reports would all
    find the same idle worker."""

    def __init__(self) -> None:
        self._sent: deque[tuple[float, int]] = deque()

    def add(self, tokens: int, *, now_s: float) -> None:
        """A prompt of which `tokens` are to be computed is sent."""
        self._drop_old(now_s)
        self._sent.append((now_s, tokens))

    def tokens(self, *, now_s: float) -> int:
        """Of those that a report may lack."""
        self._drop_old(now_s)
        return sum([tokens for _, tokens in self._sent])

    def _drop_old(self, now_s: float) -> None:
        while self._sent and self._sent[0][0] < now_s - REPORT_DELAY_S:
            self._sent.popleft()

"""The prompts that a decode worker was given to compute and has not yet reported."""

from __future__ import annotations

from collections import deque

# A report may have been made this long before it arrived, so without the prompts that were sent since.
REPORT_DELAY_S = 0.05


class UnreportedPrompts:
    """Times and tokens of the prompts. Without them several requests that come between two reports would all
    find the same idle worker."""

    def __init__(self) -> None:
        self._sent: deque[tuple[float, int]] = deque()

    def add(self, tokens: int, *, now_s: float) -> None:
        """A prompt of which `tokens` are to be computed is sent."""
        self._sent.append((now_s, tokens))

    def drop_older(self, before_s: float) -> None:
        """Forget the prompts that were sent before then: a report has them, or they are long computed."""
        while self._sent and self._sent[0][0] < before_s:
            self._sent.popleft()

    @property
    def tokens(self) -> int:
        """Of all of them."""
        return sum([tokens for _, tokens in self._sent])

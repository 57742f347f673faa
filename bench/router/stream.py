"""The log of one stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Messages = Sequence[dict[str, str]]


@dataclass(slots=True)
class StreamLog:
    """Times in seconds on the monotonic clock. `arrivals`: of messages with tokens."""

    sent_s: float
    arrivals: list[float] = field(default_factory=list)
    completion_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def ttft_ms(self) -> float:
        """The time from sending to the first token."""
        return (self.arrivals[0] - self.sent_s) * 1e3

    @property
    def total_ms(self) -> float:
        """The time from sending to the last token."""
        return (self.arrivals[-1] - self.sent_s) * 1e3

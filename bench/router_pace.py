"""What fake workers say, and how fast: the same ones of all routers. Imports nothing of the project's own."""

from __future__ import annotations

from dataclasses import dataclass

ANSWER = "The weather in Paris is sunny and 21 degrees; the train to Oslo leaves at nine o'clock today. "


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast this worker is."""

    prefill_ms: float
    prefill_us_per_token: float
    step_ms: float

    def prefill_s(self, tokens: int) -> float:
        """From the request to its first token."""
        return self.prefill_ms / 1e3 + tokens * self.prefill_us_per_token / 1e6

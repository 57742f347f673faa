"""What came of one request of the chaos."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

SDK, HTTP = "sdk", "http"


@dataclass(slots=True)
class Outcome:
    """Times are monotonic seconds. `error`: empty for a whole answer; `router`: the one that HTTP used.

    `is_lost`: the connection failed, and no router said so. `n_refused`: answers 503 that named a time to ask
    again, which the client did.
    """

    api: str
    prompt: int
    began_s: float
    router: str = ""
    ended_s: float = 0.0
    text: str = ""
    error: str = ""
    is_lost: bool = False
    n_refused: int = 0
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float | None:
        """Until the first piece of text; None without one."""
        return self.arrivals_s[0] - self.began_s if self.arrivals_s else None

    @property
    def stall_s(self) -> float:
        """The longest time between two pieces of text."""
        return max((later - sooner for sooner, later in itertools.pairwise(self.arrivals_s)), default=0.0)


def met_a_dead_router(outcome: Outcome, down_s: Sequence[tuple[float, float]]) -> bool:
    """Whether the connection failed, and the request's router was down at some time while the request ran."""
    return outcome.is_lost and any(
        outcome.began_s <= until_s and since_s <= outcome.ended_s for since_s, until_s in down_s
    )

"""Whether a process takes work, as its health pages say it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HealthState:
    """A state of a process: its name, a sentence for people, and whether new work can run."""

    status: str
    message: str
    serves: bool


LOADING = HealthState("loading", "the process loads and takes no work yet", serves=False)
READY = HealthState("ready", "the process takes work", serves=True)
DRAINING = HealthState("draining", "running work continues, new work is refused", serves=False)

# What the health pages ask.
ReadHealth = Callable[[], HealthState]


def membership_figures(*, is_draining: bool, has_lapsed: bool) -> dict[str, float]:
    """The metrics of a process's membership in the fleet."""
    return {"slipstream_draining": is_draining, "slipstream_etcd_away": has_lapsed}


class ProcessHealth:
    """The state of a process behind the router. Its fleet membership sets it."""

    def __init__(self) -> None:
        self.state = LOADING
        self.has_lapsed: Callable[[], bool] = lambda: False  # whether etcd lost the process's record

    def figures(self) -> dict[str, float]:
        """The metrics of this state."""
        return membership_figures(is_draining=self.state is DRAINING, has_lapsed=self.has_lapsed())

    def read(self) -> HealthState:
        """The state now."""
        return self.state

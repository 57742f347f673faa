"""Whether a process takes work, as its health pages say it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class HealthState:
    """A state of a process: its name, a sentence for people, and whether new work can run.

    `figures`: further values on the page of the state.
    """

    status: str
    message: str
    serves: bool
    figures: Mapping[str, float] = field(default_factory=dict)


LOADING = HealthState("loading", "the process loads and takes no work yet", serves=False)
READY = HealthState("ready", "the process takes work", serves=True)
UNANNOUNCED = HealthState(
    "unannounced", "etcd does not know the process yet, so it gets no work", serves=False
)
DRAINING = HealthState("draining", "running work continues, new work is refused", serves=False)


def loading(
    done_bytes: int, total_bytes: int, *, done_captures: int = 0, total_captures: int = 0
) -> HealthState:
    """The state of a process that reads weights, and then captures decode steps.

    LOADING before the size of the weights is known, and after all.
    """
    if done_captures < total_captures:
        text = f"capturing decode steps: {done_captures} of {total_captures} buckets"
        figures = {"done_captures": done_captures, "total_captures": total_captures}
        return replace(LOADING, message=text, figures=figures)
    if not total_bytes or done_bytes >= total_bytes:
        return LOADING
    text = (
        f"loading weights: {done_bytes * 100 // total_bytes} %, "
        f"{done_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB"
    )
    return replace(LOADING, message=text, figures={"loaded_bytes": done_bytes, "total_bytes": total_bytes})


# What the health pages ask.
ReadHealth = Callable[[], HealthState]


def membership_figures(*, is_draining: bool, has_lost_lease: bool) -> dict[str, float]:
    """The metrics of a process's membership in the fleet."""
    return {"slipstream_draining": is_draining, "slipstream_etcd_unavailable": has_lost_lease}


class ProcessHealth:
    """The state of a process behind the router. Its fleet membership sets it."""

    def __init__(self, read_loading: Callable[[], HealthState] = lambda: LOADING) -> None:
        """`read_loading`: the state while the process loads."""
        self._read_loading = read_loading
        self.state = LOADING
        self.has_lost_lease: Callable[[], bool] = lambda: False  # whether etcd lost the process's record

    def figures(self) -> dict[str, float]:
        """The metrics of this state."""
        return membership_figures(is_draining=self.state is DRAINING, has_lost_lease=self.has_lost_lease())

    def read(self) -> HealthState:
        """The state now."""
        return self._read_loading() if self.state is LOADING else self.state

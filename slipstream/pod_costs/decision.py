"""Which pods get a new deletion cost now. Pure; times are given.

Each write is an update of a pod, which every watcher of pods sees. So a cost that moves a little is left as
it stands, and a pod is written at most once a minute. A router that has just started knows little of the
workers' KV, and each round may ask another one. A cost counts once two rounds in a row want another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# A router's cost grows by 8 when the loss doubles: within 2 steps, losses differ by less than a quarter.
DEAD_BAND = 2
MIN_INTERVAL_S = 60.0
MAX_WRITES = 64  # of one round


@dataclass(frozen=True, slots=True)
class CostedPod:
    """A pod that a ReplicaSet may remove. `cost`: its annotation, None where it has none that is a number."""

    tier: str
    name: str
    uid: str
    cost: int | None = None


@dataclass(frozen=True, slots=True)
class CostWrite:
    """The cost that a pod gets."""

    pod: CostedPod
    cost: int


def cost_writes(
    pods: Iterable[CostedPod],
    wanted: Mapping[tuple[str, str], int],
    before: Mapping[tuple[str, str], int],
    written_s: Mapping[str, float],
    *,
    started_s: float,
    now_s: float,
) -> list[CostWrite]:
    """The writes that are due, those that change most first.

    `wanted`: the cost by tier and instance; a pod without one keeps what it has. `before`: those of the last
    round. `written_s`: when each pod was last written, by uid; others may have been written right before this
    writer started, at `started_s`.
    """
    due = [
        CostWrite(pod, wanted[pod.tier, pod.name])
        for pod in pods
        if now_s >= written_s.get(pod.uid, started_s) + MIN_INTERVAL_S
        and all(_wants_another(pod, costs) for costs in (wanted, before))
    ]
    return sorted(due, key=lambda write: (-_change(write.pod, write.cost), write.pod.name))[:MAX_WRITES]


def _wants_another(pod: CostedPod, costs: Mapping[tuple[str, str], int]) -> bool:
    key = pod.tier, pod.name
    return key in costs and _change(pod, costs[key]) > DEAD_BAND


def _change(pod: CostedPod, cost: int) -> int:
    """A pod without the annotation counts as 0 in Kubernetes."""
    return abs(cost - (pod.cost or 0))

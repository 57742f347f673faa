"""The clusters that are compared: the same number of processes on the same cores, started in turn."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.headline.agents import RequestOptions
from libs.common.cluster.worker_record import Role
from supervisor.configuration.plan import ClusterConfig


@dataclass(frozen=True, slots=True)
class Variant:
    """`separate`: prefill apart from decode; else every worker computes prompts and decodes.

    `affinity`: requests name their session, and the router chooses; else they take the workers in turn.
    """

    name: str
    separate: bool = True
    affinity: bool = True


COMPARISONS: Mapping[str, Sequence[Variant]] = {
    "tiers,colocated": (Variant("tiers"), Variant("colocated", separate=False)),
    "affinity": (Variant("affinity on"), Variant("affinity off", affinity=False)),
}


def cluster_of(variant: Variant, *, run_dir: Path, model: Path, prefill: int, decode: int) -> ClusterConfig:
    """The cluster, without drafts: they would change the time per token of both sides by the model's luck."""
    both = prefill + decode
    return ClusterConfig(
        run_dir=run_dir,
        model=model,
        draft_model=None,
        drafters=0,
        drafts="off",
        prefill=prefill if variant.separate else 0,
        decode=decode if variant.separate else both,
        allow_requested_prefill=not variant.affinity,
        extra_environment={role: {"OMP_NUM_THREADS": "1"} for role in (Role.PREFILL, Role.DECODE)},
    )


def options_of(variant: Variant, prefill: Sequence[str]) -> RequestOptions:
    """What each request of the variant names: its session, or the next prefill worker."""
    if variant.affinity:
        return lambda session, _: {"session": f"agent-{session}"}
    return lambda session, turn: {
        "headers": {"x-slipstream-prefill": prefill[(session + turn) % len(prefill)]}
    }


def set_cores(pids: Sequence[int]) -> bool:
    """Give each worker one core, in turn, and say whether there is one for each."""
    cores = sorted(os.sched_getaffinity(0))
    for index, pid in enumerate(pids):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {cores[index % len(cores)]})
    return len(pids) <= len(cores)

"""The inputs and the recommendations of autoscaling. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from libs.common.cluster.worker_record import Role
from slipstream.v1 import worker_pb2

# A share cannot exceed 1: with a higher aim its metric stays within HPA's tolerance of 10 % for ever.
MAX_SHARE_AIM = 0.9
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One process of the fleet. `report` is None while its load is unknown."""

    role: Role
    instance: str
    report: worker_pb2.LoadReport | None
    max_sequences: int = 0  # places of a decode worker's batch; 0: unknown
    endpoint: str = ""  # of a router: where it serves clients

    @property
    def replica(self) -> str:
        """The replica that the process belongs to: processes at one address are one router."""
        return self.endpoint or self.instance


@dataclass(frozen=True, slots=True)
class Aims:
    """The value of each signal at which a tier has the right size; a replica's mean."""

    queued_s: float = 2.0  # of prompts at a prefill worker
    busy_share: float = 0.75  # of engines of prefill, of draft heads
    loop_busy_share: float = 0.75  # of routers' event loops, waits for a core included
    kv_share: float = 0.8  # of a decode worker's KV blocks that sequences hold
    batch_share: float = 0.8  # of its places
    step_ms: float = 50.0
    missed_share: float = 0.1  # of the drafts that steps want
    loop_delay_ms: float = 20.0
    requests_share: float = 0.8  # of the requests that a router may run at once
    evicted_wanted_mib_per_s: float = 64.0  # of a kvstore node
    jobs: float = 16.0  # stored ones that could run now, a prefill or decode worker


@dataclass(frozen=True, slots=True)
class TierLimits:
    """The least and the most replicas of a tier."""

    least: int = 1
    most: int = 64


@dataclass(frozen=True, slots=True)
class AutoscalePolicy:
    """The aims, and the limits of the tiers that have other than the default ones."""

    aims: Aims = field(default_factory=Aims)
    limits: Mapping[Role, TierLimits] = field(default_factory=dict)

    def limits_of(self, role: Role) -> TierLimits:
        """The limits of a tier."""
        return self.limits.get(role, TierLimits())


@dataclass(frozen=True, slots=True)
class Signal:
    """One measured value of a tier beside its target. `unit` follows a number, `meaning` the unit."""

    name: str
    value: float
    target: float
    unit: str
    meaning: str

    @property
    def load(self) -> float:
        """The value in units of the target."""
        return self.value / self.target

    @property
    def words(self) -> str:
        """The recommendation in words."""
        return f"{self.value:.3g}{self.unit} {self.meaning}, aim {self.target:.3g}{self.unit}"


@dataclass(frozen=True, slots=True)
class Recommendation:
    """How many replicas a tier should have, and why. `active`: it needs at least one."""

    role: Role
    replicas: int
    signal: Signal
    limits: TierLimits
    reason: str
    active: bool

    @property
    def load(self) -> float:
        """The replicas that the load wants, with a fraction and without limits."""
        return self.replicas * self.signal.load

    @property
    def bounded_load(self) -> float:
        """The load within the limits: the total of HPA's metric, whose target is 1 for each replica."""
        least = max(self.limits.least, int(self.active))
        return float(min(max(self.load, least), self.limits.most))

    @property
    def wanted(self) -> int:
        """The replicas as HPA computes them: ceil(replicas * value / target), within the limits."""
        return math.ceil(self.bounded_load - _ROUNDING)

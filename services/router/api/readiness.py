"""Whether this router takes requests now: one truth for HTTP, gRPC's health service and admission."""

from __future__ import annotations

from enum import StrEnum

from services.router.execution.request_manager import RequestManager
from services.router.workers.fleet import RouterFleet


class Readiness(StrEnum):
    """The states of a router, by the names that its health page shows."""

    READY = "ready"
    DEGRADED = "degraded"
    WAITING = "waiting"
    DRAINING = "draining"

    @property
    def serves(self) -> bool:
        """Whether a request that arrives now can run."""
        return self in (Readiness.READY, Readiness.DEGRADED)

    @property
    def words(self) -> str:
        """The state as a sentence for people."""
        return _WORDS[self]


_WORDS = {
    Readiness.READY: "prefill and decode workers are ready",
    Readiness.DEGRADED: "no prefill worker is ready: decode workers compute the prompts",
    Readiness.WAITING: "no decode worker is ready",
    Readiness.DRAINING: "this router drains: running requests continue, new ones are refused",
}


def readiness_of(runs: RequestManager, fleet: RouterFleet) -> Readiness:
    """The state of a router with these requests and workers."""
    if runs.draining:
        return Readiness.DRAINING
    if not fleet.can_serve:
        return Readiness.WAITING
    return Readiness.READY if fleet.ready else Readiness.DEGRADED

"""Whether this router takes requests now: one truth for HTTP, gRPC's health service and admission."""

from __future__ import annotations

from libs.common.runtime.readiness import HealthState
from services.router.execution.request_manager import RequestManager
from services.router.workers.fleet import RouterFleet

READY = HealthState("ready", "prefill and decode workers are ready", serves=True)
DEGRADED = HealthState(
    "degraded", "no prefill worker is ready: decode workers compute the prompts", serves=True
)
WAITING = HealthState("waiting", "no decode worker is ready", serves=False)
DRAINING = HealthState(
    "draining", "this router drains: running requests continue, new ones are refused", serves=False
)


def readiness_of(manager: RequestManager, fleet: RouterFleet) -> HealthState:
    """The state of a router with these requests and workers."""
    if manager.draining:
        return DRAINING
    if not fleet.can_serve:
        return WAITING
    return READY if fleet.ready else DEGRADED

"""What all requests of this router are served with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from libs.common.rpc.telemetry import Counters
from services.router.execution.attempt import SILENCE_S
from services.router.execution.dispatcher import Dispatcher
from services.router.execution.failover import Continuity
from services.router.execution.sessions import Sessions
from services.router.execution.start_pacer import Turns
from services.router.request.model_card import ModelCard
from services.router.request.token_cache import TokenMemory
from services.router.workers.fleet import RouterFleet

# How long a request that was already placed once waits for a worker to come (back).
RECOVERY_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """What requests are served with."""

    fleet: RouterFleet
    dispatcher: Dispatcher
    sessions: Sessions
    card: ModelCard
    counters: Counters
    clock: Callable[[], float]  # the event loop's
    wall_clock_s: Callable[[], float]
    continuity: Continuity
    recovery_wait_s: float = RECOVERY_WAIT_S
    silence_s: float = SILENCE_S
    memory: TokenMemory = field(default_factory=TokenMemory)
    turns: Turns = field(default_factory=Turns)  # of requests that come together

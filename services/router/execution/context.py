"""What all requests of this router are served with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from libs.common.rpc.telemetry import Counters
from services.router.execution.attempt import SILENCE_S
from services.router.execution.dispatcher import Dispatcher
from services.router.execution.failover import FailoverState
from services.router.execution.sessions import Sessions
from services.router.execution.start_pacer import StartPacer
from services.router.request.model_card import ModelCard
from services.router.request.token_cache import TokenCache
from services.router.workers.fleet import RouterFleet

# How long a request that was already placed once waits for a worker to come (back).
RECOVERY_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class RouterContext:
    """What requests are served with."""

    fleet: RouterFleet
    dispatcher: Dispatcher
    sessions: Sessions
    card: ModelCard
    counters: Counters
    clock: Callable[[], float]  # the event loop's
    wall_clock_s: Callable[[], float]
    continuity: FailoverState
    recovery_wait_s: float = RECOVERY_WAIT_S
    silence_s: float = SILENCE_S
    memory: TokenCache = field(default_factory=TokenCache)
    turns: StartPacer = field(default_factory=StartPacer)  # of requests that come together

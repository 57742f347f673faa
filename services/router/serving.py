"""What all requests of this router are served with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from libs.common.telemetry import Counters
from services.router.attempt import SILENCE_S
from services.router.continuity import Continuity
from services.router.dispatch import Dispatcher
from services.router.fleet import RouterFleet
from services.router.model_card import ModelCard
from services.router.sessions import Sessions
from services.router.token_memory import TokenMemory
from services.router.turns import Turns

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

"""The router's parts that every request uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from libs.common.telemetry.counters import Counters
from services.router.admission.fair_threads import FairThreads
from services.router.execution.dispatcher import Dispatcher
from services.router.execution.failover import FailoverState
from services.router.execution.policies.start_pacer import StartPacer
from services.router.execution.sessions import Sessions
from services.router.metering.metering import Metering
from services.router.recording.recorder import RequestRecorder
from services.router.request.conversations.token_cache import TokenCache
from services.router.request.model_card import ModelCard
from services.router.request.prompt_salts import PromptSalts
from services.router.workers.fleet import RouterFleet

# How long a request that was placed before waits for a ready worker, and how long after the begin of an
# outage a new one does.
RECOVERY_WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class RouterContext:
    """The fleet, the policies, the caches and the clocks. One for each router process."""

    fleet: RouterFleet
    dispatcher: Dispatcher
    sessions: Sessions
    card: ModelCard
    counters: Counters
    clock: Callable[[], float]  # the event loop's clock
    wall_clock_s: Callable[[], float]
    failover: FailoverState
    recorder: RequestRecorder
    recovery_wait_s: float = RECOVERY_WAIT_S
    token_cache: TokenCache = field(default_factory=TokenCache)
    threads: FairThreads = field(default_factory=FairThreads)
    salts: PromptSalts = field(default_factory=PromptSalts)
    start_pacer: StartPacer = field(default_factory=StartPacer)
    metering: Metering | None = None  # None: no prices, no limits, and usage is not counted

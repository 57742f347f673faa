"""Which worker a scale-down should drain: the one with which the fleet loses least. Pure.

A loss is counted in prompt tokens to compute again. KV that exists elsewhere too is read there, which takes
about a thirtieth of the time (bench/placement/model.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from libs.common.cluster.worker_record import Role

_READ_COST = 1 / 32
# Costs of pods grow with the logarithm of the loss, so that a loss that changes a little changes no cost.
_COST_STEPS = 8  # for twice the loss
_COST_SCALE = 256  # a loss far below it has cost 0


@dataclass(frozen=True, slots=True)
class WorkerHoldings:
    """The holdings of a worker that the fleet uses. `endpoint` is that of its WorkerService."""

    role: Role
    instance: str
    endpoint: str = ""
    requests: int = 0  # running and waiting, and exports that are not released
    tokens_in_flight: int = 0  # of prompts and contexts
    unique_blocks: int = 0  # cached nowhere else
    block_tokens: int = 64
    sessions: int = 0  # placed there
    session_blocks: int = 0

    @property
    def lost_tokens(self) -> int:
        """The tokens that its removal costs."""
        session_tokens = self.session_blocks * self.block_tokens
        unique_tokens = self.unique_blocks * self.block_tokens
        return int(self.tokens_in_flight + unique_tokens + session_tokens * _READ_COST)


def removal_order(workers: Iterable[WorkerHoldings]) -> list[WorkerHoldings]:
    """The workers by tier, the one whose removal costs least first."""
    return sorted(
        workers,
        key=lambda each: (each.role, each.lost_tokens, each.sessions, each.requests, each.instance),
    )


def deletion_cost(holdings: WorkerHoldings) -> int:
    """The cost of removing the worker's pod: 0 for no loss, and 8 more for each doubling of a large one.

    A request and a session count like a token, so that routers, which hold no KV, differ too.
    """
    loss = holdings.lost_tokens + holdings.sessions + holdings.requests
    return round(_COST_STEPS * math.log2(1 + loss / _COST_SCALE))

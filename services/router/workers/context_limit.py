"""The longest context that the router promises: one that half of each tier takes, or more of it.

Placement leaves out workers that do not take a request. So a minority with a wrong bound, small or large,
changes nothing for the others. Among two workers that differ the larger bound counts.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable

from libs.common.cluster.worker_record import Role, Worker
from libs.common.telemetry.paced_warnings import PacedWarnings
from services.router.workers.fleet import RouterFleet

log = logging.getLogger(__name__)

_TIERS = (Role.PREFILL, Role.DECODE)


def promised_context_tokens(workers: Iterable[Worker]) -> int | None:
    """The longest context that half of the prefill and half of the decode workers take. Pure.

    None where no bound follows. A worker that states no bound takes any context, as it does in placement.
    """
    by_tier: dict[Role, list[int]] = {role: [] for role in _TIERS}
    for worker in workers:
        if worker.role in by_tier:
            by_tier[worker.role].append(worker.max_context_tokens or sys.maxsize)
    promised = [sorted(tier, reverse=True)[(len(tier) - 1) // 2] for tier in by_tier.values() if tier]
    return min((tokens for tokens in promised if tokens < sys.maxsize), default=None)


def longest_context_tokens(workers: Iterable[Worker]) -> int | None:
    """The longest context that any of the workers takes; None without a worker, or where one has no bound."""
    stated = [worker.max_context_tokens or sys.maxsize for worker in workers]
    longest = max(stated, default=sys.maxsize)
    return longest if longest < sys.maxsize else None


class ContextLimit:
    """The bound of the workers that may get requests. It is computed again when one comes or goes."""

    def __init__(self, fleet: RouterFleet) -> None:
        self._fleet = fleet
        self._seen: tuple[int, int | None] = (-1, None)  # version of the fleet, and its bound
        self._warnings = PacedWarnings(log)

    def __call__(self) -> int | None:
        """The bound; None while no worker that is ready states one."""
        version, tokens = self._seen
        if version != self._fleet.version:
            version, served = self._fleet.version, self._fleet.fingerprint()
            links = [link for link in self._fleet.links() if link.ready and link.fingerprint == served]
            usable = [link.worker for link in links]
            tokens = promised_context_tokens(usable)
            self._seen = (version, tokens)
            self._warn(usable, tokens or 0)
        return tokens

    def _warn(self, workers: Iterable[Worker], promised_tokens: int) -> None:
        for worker in workers:
            if worker.role in _TIERS and not worker.takes(promised_tokens):
                name, most = f"{worker.role}/{worker.instance}", worker.max_context_tokens
                text = (
                    f"{name} takes {most} tokens of context, and gets no request for up to {promised_tokens}"
                )
                self._warnings.warn(name, text)

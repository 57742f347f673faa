"""The longest context that every worker of the fleet takes, as its record in discovery states it."""

from __future__ import annotations

from collections.abc import Iterable

from libs.common.cluster.worker_record import Role, Worker
from services.router.workers.fleet import RouterFleet

_ENGINES = (Role.PREFILL, Role.DECODE)


def least_context_tokens(workers: Iterable[Worker]) -> int | None:
    """The least bound of prefill and decode workers; None where none states one. Pure."""
    stated = [w.capacity.get("max_context_tokens", 0) for w in workers if w.role in _ENGINES]
    return min((tokens for tokens in stated if tokens > 0), default=None)


class ContextLimit:
    """The bound of the workers that may get requests. It is computed again when one comes or goes."""

    def __init__(self, fleet: RouterFleet) -> None:
        self._fleet = fleet
        self._seen: tuple[int, int | None] = (-1, None)  # version of the fleet, and its bound

    def __call__(self) -> int | None:
        """The bound; None while no worker that is ready states one."""
        version, tokens = self._seen
        if version != self._fleet.version:
            version, served = self._fleet.version, self._fleet.fingerprint()
            usable = [link for link in self._fleet.links() if link.ready and link.fingerprint == served]
            tokens = least_context_tokens(link.worker for link in usable)
            self._seen = (version, tokens)
        return tokens

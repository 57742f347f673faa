"""Failed calls: which of them are made again, and for how long."""

from __future__ import annotations

import time
from typing import Any

import grpc
from grpc_status import rpc_status

from slipstream.endpoints import Endpoints
from slipstream.errors import Draining, Unavailable
from slipstream.rpc.rpc_errors import from_rpc_error

# The pause before a call is made again.
PAUSE_S = 0.5
# How long a call or a follower looks for a router that answers.
LOST_S = 30.0
# Failures that look like TLS at one end only, as each try would; a router that stops causes one.
_HINTED_TRIES = 3
# How gRPC's texts begin for a call that it had no connection for.
_UNSENT = ("failed to connect to all addresses", "DNS resolution failed")


class Losses:
    """How long one call has found no router."""

    def __init__(self, *, is_idempotent: bool = True, within_s: float | None = None) -> None:
        """`is_idempotent` False: only a call that reached no router is made again.

        `within_s`: how long it is made again, at most and by default LOST_S.
        """
        self._is_idempotent = is_idempotent
        self._within_s = LOST_S if within_s is None else min(within_s, LOST_S)
        self._since_s: float | None = None
        self._n_hinted = 0  # failures whose cause may be TLS, before any router was reached

    def answered(self) -> None:
        """Record that a router answers."""
        self._since_s = None

    def check(self, endpoints: Endpoints[Any], error: grpc.RpcError) -> None:
        """Raises the typed error where another try is no use, or may do a thing twice."""
        failure = from_rpc_error(error)
        explained = endpoints.explained(failure)
        self._n_hinted += explained is not failure and explained.message != failure.message
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        is_passing = isinstance(failure, Unavailable) and self._n_hinted < _HINTED_TRIES
        is_harmless = self._is_idempotent or isinstance(failure, Draining) or _is_unsent(error)
        is_late = now_s - self._since_s > self._within_s
        if not (is_passing and is_harmless) or endpoints.closed or is_late:
            raise explained from None


def _is_unsent(error: grpc.RpcError) -> bool:
    """Whether no router can have received the call. A connection that broke amid it is no case."""
    details = error.details() or ""
    return rpc_status.from_call(error) is None and details.startswith(_UNSENT)

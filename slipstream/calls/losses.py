"""Failed calls: which of them are made again, and for how long."""

from __future__ import annotations

import time
from typing import Any

import grpc

from slipstream.calls.refusals import Refusals
from slipstream.endpoints import Endpoints
from slipstream.errors import Draining, Unavailable
from slipstream.rpc.rpc_errors import from_rpc_error, status_of

# The pause before a call is made again.
PAUSE_S = 0.5
# The pause before a call of RouterService is repeated that no router received.
UNARY_PAUSE_S = 0.1
UNARY_TIMEOUT_S = 10.0
# How long a call or a follower looks for a router that answers.
LOST_S = 30.0
# The time-out of a try. Of streams, which have none: for how long they are made again after refusals.
CALL_S = 60.0
_LEAST_S = 0.001  # gRPC takes no time-out of 0
# Failures that look like TLS at one end only, as each try would; a router that stops causes one.
_HINTED_TRIES = 3
# How gRPC's texts begin for a call that it had no connection for.
_UNSENT = ("failed to connect to all addresses", "DNS resolution failed")


class Losses:
    """How long one call has found no router, and how often routers refused it."""

    def __init__(self, max_retries: int, *, is_idempotent: bool = True, timeout_s: float = CALL_S) -> None:
        """`is_idempotent` False: only a call that no router ran is made again.

        `timeout_s`: of a try. Refused tries share one, with their pauses. A call that finds no router is made
        again for so long, and for LOST_S at most.
        """
        self._max_retries = max_retries
        self._is_idempotent = is_idempotent
        self._timeout_s = timeout_s
        self._since_s: float | None = None
        self._n_hinted = 0  # failures whose cause may be TLS, before any router was reached
        self.answered()

    def answered(self) -> None:
        """Record that a router answers. The time-out begins again."""
        self._since_s = None
        self._refusals = Refusals(self._max_retries)
        self._until_s = time.monotonic() + self._timeout_s

    def left_s(self) -> float:
        """The time-out of the next try, in seconds."""
        return max(self._until_s - time.monotonic(), _LEAST_S)

    def pause_s(self, endpoints: Endpoints[Any], error: grpc.RpcError) -> float:
        """The pause before the next try. Raises the typed error where another try is no use.

        So it does where one may do a thing twice: a refused call did nothing.
        """
        named_s = self._refusals.named_pause_s(error, left_s=self.left_s())
        if named_s is not None and not endpoints.closed:
            self._since_s = None
            return named_s
        failure = from_rpc_error(error)
        explained = endpoints.explained(failure)
        self._n_hinted += explained is not failure and explained.message != failure.message
        now_s = time.monotonic()
        self._since_s = now_s if self._since_s is None else self._since_s
        is_passing = isinstance(failure, Unavailable) and self._n_hinted < _HINTED_TRIES
        is_harmless = self._is_idempotent or isinstance(failure, Draining) or _is_unsent(error)
        is_late = now_s - self._since_s > min(self._timeout_s, LOST_S)
        if not (is_passing and is_harmless) or endpoints.closed or is_late:
            raise explained from None
        self._until_s = now_s + PAUSE_S + self._timeout_s
        return PAUSE_S


class UnaryTries:
    """The tries of one call of RouterService, which is idempotent, within its time-out."""

    def __init__(self, max_retries: int, timeout_s: float | None) -> None:
        """`timeout_s` None: UNARY_TIMEOUT_S."""
        self._until_s = time.monotonic() + (UNARY_TIMEOUT_S if timeout_s is None else timeout_s)
        self._refusals = Refusals(max_retries)
        self._is_repeated = False

    def left_s(self) -> float:
        """The time-out of the next try, in seconds."""
        return max(self._until_s - time.monotonic(), _LEAST_S)

    def pause_s(self, endpoints: Endpoints[Any], error: grpc.RpcError) -> float:
        """The pause before the next try. Raises the typed error where there is none.

        A call that no router received is repeated once, one that a router refuses when the router says.
        """
        named_s = self._refusals.named_pause_s(error, left_s=self.left_s())
        if named_s is not None and not endpoints.closed:
            return named_s
        if _is_unheard(error) and not self._is_repeated and not endpoints.closed:
            self._is_repeated = True
            return UNARY_PAUSE_S
        raise endpoints.explained(from_rpc_error(error)) from None


def _is_unsent(error: grpc.RpcError) -> bool:
    """Whether no router can have received the call. A connection that broke amid it is no case."""
    details = error.details() or ""
    return status_of(error) is None and details.startswith(_UNSENT)


def _is_unheard(error: grpc.RpcError) -> bool:
    """Whether a connection failed, and no router answered. gRPC's own retries are off."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and status_of(error) is None

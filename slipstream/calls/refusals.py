"""Calls that routers refuse for lack of capacity: which are made again, and after which pause. Pure."""

from __future__ import annotations

import grpc

from slipstream.errors import Overloaded, SlipstreamError
from slipstream.rpc.rpc_errors import from_rpc_error, names_pause

# How often a call that routers refuse is made again.
MAX_RETRIES = 2


class Refusals:
    """How often one call is made again that routers refuse."""

    def __init__(self, max_retries: int) -> None:
        self._n_left = max_retries

    def pause_s(self, error: SlipstreamError, *, left_s: float) -> float | None:
        """The pause before the next try, which counts. None: the error is final.

        `left_s`: the time until the call's deadline, which the pause may not reach.
        """
        if not isinstance(error, Overloaded) or self._n_left <= 0:
            return None
        pause_s: float = error.retry_after_ms / 1e3
        if not pause_s or pause_s >= left_s:
            return None
        self._n_left -= 1
        return pause_s

    def named_pause_s(self, error: grpc.RpcError, *, left_s: float) -> float | None:
        """`pause_s` for a call that may have effects: only what a router itself refused ran nothing."""
        return self.pause_s(from_rpc_error(error), left_s=left_s) if names_pause(error) else None

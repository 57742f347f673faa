"""Decides after a failed attempt between another attempt and an error. Pure.

The policy limits the attempts in a row that add no token. Attempts that add tokens reset this count, so a
long stream survives many worker failures. An attempt that left a draining worker does not count there. All
attempts at a request together have a bound, too. `retry_loop.py` asks after each failure.
"""

from __future__ import annotations

from libs.common.fleet_bounds import MAX_UNREAD_HANDOFFS
from libs.common.service_bounds import MAX_ATTEMPTS, MAX_FRUITLESS_ATTEMPTS
from slipstream import errors

# Errors after which another worker, or the same one later, may succeed.
_RETRYABLE = (
    errors.Unavailable,
    errors.Overloaded,
    errors.DataCorrupt,
    errors.FailedPrecondition,
    errors.NotFound,
    errors.Internal,
    errors.ContextExceeded,  # the worker takes less than its record states
)
# Of workers that have no room or drain: these say nothing of the handoff that they did not read.
_REFUSALS = (errors.Overloaded, errors.Draining)


class RetryPolicy:
    """The failures of one request. `avoid`: keys of the workers that the next attempt should not use."""

    def __init__(self, *, max_attempts: int = MAX_ATTEMPTS) -> None:
        self.avoid: set[str] = set()
        self.error: errors.SlipstreamError | None = None  # of the last attempt
        self._max_attempts = max_attempts
        self._fruitless = 0
        self._attempts = 0
        self._unread = 0

    @property
    def reads_no_handoff(self) -> bool:
        """Whether the KV of so many prefill workers was not read that a decode worker computes the prompt."""
        return self._unread >= MAX_UNREAD_HANDOFFS

    def failed(self, error: errors.SlipstreamError, worker: str, other: str = "", *, new_tokens: int) -> None:
        """Record a failed attempt at `worker`, or between it and the `other` one.

        Raises the client's error when no other attempt may follow.
        """
        self._attempts += 1
        if not isinstance(error, _REFUSALS):
            self._unread = self._unread + 1 if other else 0
        self.error = error
        if new_tokens:
            self._fruitless = 0
            if not other:  # else the token is that of a prefill worker whose KV nothing read
                self.avoid.clear()
        elif not isinstance(error, errors.Draining):
            self._fruitless += 1
        is_final = not isinstance(error, _RETRYABLE) or isinstance(error, errors.Quarantined)
        if is_final or self._fruitless >= MAX_FRUITLESS_ATTEMPTS or self._attempts >= self._max_attempts:
            raise error
        self.avoid.update(filter(None, (worker, other)))

"""When a request that lost its worker goes on elsewhere, and when it has failed enough. Pure.

Attempts that add tokens are progress, so a long stream outlives any number of workers; attempts in a
row that add none are counted. A worker that drains hands its requests back: that is no failure.
"""

from __future__ import annotations

from libs.common.service_bounds import MAX_ATTEMPTS, MAX_FRUITLESS_ATTEMPTS
from slipstream import errors

# What another worker, or the same one later, may do better.
_RETRYABLE = (
    errors.Unavailable,
    errors.Overloaded,
    errors.DataCorrupt,
    errors.FailedPrecondition,
    errors.NotFound,
    errors.Internal,
)


class RetryPolicy:
    """The failures of one request. `avoid`: keys of the workers that the next attempt should not use."""

    def __init__(
        self, *, max_fruitless: int = MAX_FRUITLESS_ATTEMPTS, max_attempts: int = MAX_ATTEMPTS
    ) -> None:
        self.avoid: set[str] = set()
        self.error: errors.SlipstreamError | None = None  # of the last attempt
        self._max_fruitless = max_fruitless
        self._max_attempts = max_attempts
        self._fruitless = 0
        self._attempts = 0

    def failed(self, error: errors.SlipstreamError, worker: str, other: str = "", *, new_tokens: int) -> None:
        """An attempt failed at `worker`, or between it and the `other` one. Raises what the client is told
        when there is no point in another."""
        self._attempts += 1
        self.error = error
        if new_tokens:
            self._fruitless = 0
            self.avoid.clear()
        elif not isinstance(error, errors.Draining):
            self._fruitless += 1
        final = not isinstance(error, _RETRYABLE) or isinstance(error, errors.Quarantined)
        if final or self._fruitless >= self._max_fruitless or self._attempts >= self._max_attempts:
            raise error
        self.avoid.update(filter(None, (worker, other)))

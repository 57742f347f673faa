"""Time left of a request, on the event loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slipstream.errors import DeadlineExceeded


def deadline_after(*left_ms: float | None) -> float | None:
    """When the earliest of several limits is reached, loop time in seconds; None and 0 are no limits."""
    limits = [ms for ms in left_ms if ms]
    if not limits:
        return None
    return asyncio.get_running_loop().time() + max(min(limits), 0.0) / 1e3


def left_s(deadline_s: float | None) -> float | None:
    """Seconds until the deadline, for an rpc's time-out: never 0, which would mean at once to some."""
    if deadline_s is None:
        return None
    return max(deadline_s - asyncio.get_running_loop().time(), 0.001)


@asynccontextmanager
async def until(deadline_s: float | None) -> AsyncIterator[None]:
    """Cancel the body at the deadline and raise DeadlineExceeded for it."""
    try:
        async with asyncio.timeout_at(deadline_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline passed") from None

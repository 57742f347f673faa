"""Deadlines of requests, on the event loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from slipstream.errors import DeadlineExceeded


def deadline_after(left_ms: int) -> float | None:
    """The loop time, in seconds, after `left_ms` from now; None for 0, which means no deadline."""
    return asyncio.get_running_loop().time() + left_ms / 1e3 if left_ms else None


def left_s(deadline_s: float | None) -> float | None:
    """Seconds until the deadline, as an RPC timeout: at least 1 ms, as 0 expires at once in some clients."""
    if deadline_s is None:
        return None
    return max(deadline_s - asyncio.get_running_loop().time(), 0.001)


@asynccontextmanager
async def until(deadline_s: float | None) -> AsyncIterator[None]:
    """Cancel the body at the deadline and raise DeadlineExceeded."""
    try:
        async with asyncio.timeout_at(deadline_s):
            yield
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline passed") from None

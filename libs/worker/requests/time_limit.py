"""Waits for a future with a time budget that may grow during the wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

# A timer that fires this late shows that the process was not running. The result may have arrived meanwhile,
# so the wait is extended by the delay, in all by at most MAX_EXTRA_S.
LATE_S = 0.02
MAX_EXTRA_S = 0.25


async def wait_within(work: asyncio.Future[Any], left_ms: Callable[[], float]) -> bool:
    """Wait until `work` is done or the budget is spent; returns whether it is done. Never cancels `work`."""
    loop = asyncio.get_running_loop()
    extra_s = MAX_EXTRA_S
    while not work.done():
        wait_s = left_ms() / 1e3
        due_s = loop.time() + wait_s
        if wait_s > 0:
            await asyncio.wait({work}, timeout=wait_s)
        if left_ms() > 0 or work.done():
            continue
        late_s = min(loop.time() - due_s, extra_s)
        if late_s < LATE_S:
            break
        extra_s -= late_s
        await asyncio.wait({work}, timeout=late_s)
    return work.done()

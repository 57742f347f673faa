"""The clients of each tenant that follow jobs, or responses that jobs make."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import TypeVar

from libs.common import service_bounds
from slipstream.errors import Overloaded

T = TypeVar("T")
KEY_CHECK_S = 1.0  # how long what runs by a key may outlive it


class Followers:
    """Counts the clients at one API of a router."""

    def __init__(self, noun: str) -> None:
        """`noun`: what they follow, for errors."""
        self._noun = noun
        self._counts: Counter[str] = Counter()  # by tenant

    @contextlib.contextmanager
    def following(self, tenant: str) -> Iterator[None]:
        """Count a client. Raises Overloaded for too many of its tenant."""
        if self._counts[tenant] >= service_bounds.MAX_TENANT_JOB_FOLLOWERS:
            raise Overloaded(f"too many clients of this tenant follow {self._noun} at this router")
        self._counts[tenant] += 1
        try:
            yield
        finally:
            self._counts[tenant] -= 1
            self._counts += Counter()  # forgets tenants with none


async def while_allowed(
    changes: AsyncIterator[T], check_key: Callable[[], object]
) -> AsyncGenerator[T | None, None]:
    """The changes, and None after each KEY_CHECK_S without one, until their end or that of the key.

    `check_key` raises Unauthenticated once the key of the call counts no more.
    """
    waiting = asyncio.ensure_future(anext(changes, None))
    try:
        while True:
            has_changed, _ = await asyncio.wait([waiting], timeout=KEY_CHECK_S)
            check_key()
            if not has_changed:
                yield None
                continue
            if (change := waiting.result()) is None:
                return
            yield change
            del change  # it may have megabytes, and the next one come in hours
            waiting = asyncio.ensure_future(anext(changes, None))
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])

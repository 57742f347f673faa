"""Passes the outcome of one future on to another one."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


def pass_outcome(ended: asyncio.Future[T], waiting: asyncio.Future[T]) -> None:
    """End `waiting` as `ended` did: with its result, its error or a cancel. It may have ended already."""
    error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
    if waiting.done():
        return
    if error is None:
        waiting.set_result(ended.result())
    elif isinstance(error, asyncio.CancelledError):
        waiting.cancel()
    else:
        waiting.set_exception(error)

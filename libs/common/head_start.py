"""A coroutine that begins where it is made, and not in a later turn of the event loop.

    begun = HeadStart(call.write(message))    # runs up to where it first waits
    await begun                               # later, in one task, once: the rest of it

What Python 3.12 has eager tasks for. While the first step runs the current task is its maker's, so what asks
for the current task, as `asyncio.timeout` does, must not be begun like this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class HeadStart(Generic[Result]):
    """To make one raises nothing: what the first step raised, `await` raises."""

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self._coroutine = coroutine
        self._waits_for: Any = None
        self._end: BaseException | None = None
        try:
            self._waits_for = coroutine.send(None)
        except (Exception, asyncio.CancelledError) as end:
            self._end = end

    def __await__(self) -> Generator[Any, Any, Result]:
        if self._end is not None:
            return self._result_of(self._end)
        waits_for = self._waits_for
        while True:
            try:
                yield waits_for
                break
            except BaseException as thrown:  # a cancel: the coroutine's to deal with, which may wait again
                try:
                    waits_for = self._coroutine.throw(thrown)
                except StopIteration as end:
                    return self._result_of(end)
        return (yield from self._coroutine.__await__())

    @staticmethod
    def _result_of(end: BaseException) -> Result:
        if not isinstance(end, StopIteration):
            raise end
        result: Result = end.value
        return result

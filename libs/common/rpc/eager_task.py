"""A coroutine that begins where it is made, and not in a later turn of the event loop.

    begun = EagerTask(call.write(message))    # runs up to where it first waits
    await begun                               # later, in one task, once: the rest of it

What Python 3.12 has eager tasks for. While the first step runs the current task is its maker's, so what asks
for the current task, as `asyncio.timeout` does, must not be begun like this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any, Generic, TypeVar, cast

from libs.common.rpc.raise_once import raise_once

Result = TypeVar("Result")


class EagerTask(Generic[Result]):
    """To make one raises nothing: what the first step raised, `await` raises."""

    def __init__(self, coroutine: Coroutine[Any, Any, Result]) -> None:
        self._coroutine = coroutine
        self._waits_for: Any = None
        self._is_over = False
        self._result: Any = None
        self._error: BaseException | None = None
        try:
            self._waits_for = coroutine.send(None)
        except StopIteration as end:
            self._is_over, self._result = True, end.value
        except (Exception, asyncio.CancelledError) as error:
            # Without this frame, the outermost: it knows what is made here.
            self._error = error.with_traceback(error.__traceback__.tb_next if error.__traceback__ else None)

    def __await__(self) -> Generator[Any, Any, Result]:
        raise_once(self)
        if self._is_over:
            return cast(Result, self._result)
        waits_for, self._waits_for = self._waits_for, None
        while True:
            try:
                yield waits_for
                break
            except BaseException as thrown:  # a cancel: the coroutine's to deal with, which may wait again
                try:
                    waits_for = self._coroutine.throw(thrown)
                except StopIteration as done:
                    return cast(Result, done.value)
        return (yield from self._coroutine.__await__())

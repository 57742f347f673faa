"""The end of a worker process within seconds, also where a step or a wait for one never ends.

The interpreter joins the threads of pools when it ends. A copy of pages that waits for a step that hangs is
in the loop's pool, and would keep the process alive. So a process ends without threads that stay, with the
status `HUNG` instead of 0. Its last line names where they stand.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from libs.common.runtime.exit_codes import HUNG
from libs.common.worker_bounds import CLOSE_S, THREADS_S
from libs.worker.engine.model_thread import ModelThread

log = logging.getLogger(__name__)

_POLL_S = 0.02
_NAME = "loop-pool"
_SHOWN_CALLS = 5  # the innermost ones of what hangs


class BoundedEnd:
    """Make it on the running loop, whose default pool it becomes."""

    def __init__(self, *, close_s: float = CLOSE_S, threads_s: float = THREADS_S) -> None:
        self._close_s, self._threads_s = close_s, threads_s
        self._pool = ThreadPoolExecutor(thread_name_prefix=_NAME)
        self._hung: list[str] = []
        asyncio.get_running_loop().set_default_executor(self._pool)

    async def close(self, close: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await `close()`, but not for longer than `close_s`."""
        closing = asyncio.create_task(close())
        try:
            await asyncio.wait({closing}, timeout=self._close_s)
            if closing.done():
                await closing
            else:
                self._hung.append(f"the worker's end in {_place_of_wait(closing)}")
                log.warning("the worker did not close within %g s", self._close_s)
        finally:
            closing.cancel()

    async def finish(self, status: int = 0, end: Callable[[int], None] = os._exit) -> None:
        """Return when the interpreter can end; else end the process with its status, or `HUNG` for 0."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        deadline_s = time.monotonic() + self._threads_s
        while (staying := _staying()) and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        hung = self._hung + [f"{thread.name} in {_place_of_thread(thread)}" for thread in staying]
        if hung:
            status = status or HUNG
            log.warning("the process ends with status %d while parts of it hang: %s", status, "; ".join(hung))
            logging.shutdown()
            end(status)


def _staying() -> list[threading.Thread]:
    """The threads of the pool and of the model with work that is not done."""
    running = threading.enumerate()
    return [each for each in running if each.name.startswith(_NAME) or isinstance(each, ModelThread)]


def _place_of_thread(thread: threading.Thread) -> str:
    """The innermost calls of the thread, each with its file's line."""
    frame = sys._current_frames().get(thread.ident or 0)
    calls: list[str] = []
    while frame is not None and len(calls) < _SHOWN_CALLS:
        calls.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return _chain(calls[::-1])


def _place_of_wait(task: asyncio.Task[None]) -> str:
    """The innermost coroutines that the task awaits."""
    calls: list[str] = []
    awaited: Any = task.get_coro()
    while inspect.iscoroutine(awaited):
        frame = awaited.cr_frame
        calls.append(f"{awaited.cr_code.co_qualname}:{frame.f_lineno if frame is not None else 0}")
        awaited = awaited.cr_await
    return _chain(calls[-_SHOWN_CALLS:])


def _chain(calls: list[str]) -> str:
    return " > ".join(calls) or "no call"

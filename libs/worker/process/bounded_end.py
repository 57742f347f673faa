"""The end of a worker process within seconds, also where a step or a wait for one never ends.

The interpreter joins the threads of pools when it ends. A copy of pages that waits for a step that hangs is
in the loop's pool, and would keep the process alive. So a process ends without threads that stay. One whose
model hangs did not end in order, so its status is 1, too.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from libs.common.worker_bounds import CLOSE_S, THREADS_S
from libs.worker.engine.model_thread import ModelThread

log = logging.getLogger(__name__)

_POLL_S = 0.02
_NAME = "loop-pool"


class BoundedEnd:
    """Make it on the running loop, whose default pool it becomes."""

    def __init__(self, *, close_s: float = CLOSE_S, threads_s: float = THREADS_S) -> None:
        self._close_s, self._threads_s = close_s, threads_s
        self._pool = ThreadPoolExecutor(thread_name_prefix=_NAME)
        self._is_cut = False
        asyncio.get_running_loop().set_default_executor(self._pool)

    async def close(self, close: Callable[[], Awaitable[None]]) -> None:
        """Await `close()`, but not for longer than `close_s`."""
        try:
            async with asyncio.timeout(self._close_s) as limit:
                await close()
        except TimeoutError:
            if not limit.expired():
                raise
            self._is_cut = True
            log.warning("the worker did not close within %g s: a step or a transfer hangs", self._close_s)

    async def finish(self, end: Callable[[int], None] = os._exit) -> None:
        """Return when the interpreter can end; otherwise end the process with status 1."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        deadline_s = time.monotonic() + self._threads_s
        while (staying := _staying()) and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        if self._is_cut or staying:
            names = ", ".join(thread.name for thread in staying) or "the engine's"
            log.warning("the process ends while threads of it hang: %s", names)
            logging.shutdown()
            end(1)


def _staying() -> list[threading.Thread]:
    """The threads of the pool and of the model with work that is not done."""
    running = threading.enumerate()
    return [each for each in running if each.name.startswith(_NAME) or isinstance(each, ModelThread)]

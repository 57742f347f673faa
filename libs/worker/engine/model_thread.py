"""The thread on which a worker runs its model. A process in which it hangs ends with status 70."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

from libs.common.worker_bounds import MODEL_STOP_S

log = logging.getLogger(__name__)


class ModelThread(threading.Thread):
    """A daemon thread: a step that hangs must not keep a stopping process alive (see `BoundedEnd`)."""

    def __init__(self, run: Callable[..., None], *arguments: Any, name: str) -> None:
        super().__init__(target=run, args=arguments, name=name, daemon=True)

    async def ended(self) -> None:
        """Return when the thread has ended, or hangs. Ask it to end before."""
        await asyncio.get_running_loop().run_in_executor(None, self.join, MODEL_STOP_S)
        if self.is_alive():
            log.warning("the %s thread did not end within %g s", self.name, MODEL_STOP_S)

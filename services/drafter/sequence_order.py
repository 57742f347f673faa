"""The order of what waits for reads of exported rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger(__name__)


class SequenceOrder:
    """Steps of a stream's sequences that wait: those of one sequence run one after the other."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._newest: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, seq_id: str) -> bool:
        """Whether a step of the sequence has not ended."""
        return seq_id in self._newest

    @property
    def names(self) -> set[str]:
        """The sequences with such steps."""
        return set(self._newest)

    def add(self, seq_id: str, step: Callable[[], Awaitable[None]]) -> None:
        """Run `step` when the earlier ones of the sequence have ended."""
        task = asyncio.create_task(_run_after(self._newest.get(seq_id), step), name=f"rows of {seq_id}")
        self._newest[seq_id] = task
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._remove(seq_id, task))

    def cancel(self) -> None:
        """End all steps; none of them goes on."""
        for task in self._tasks:
            task.cancel()

    def _remove(self, seq_id: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._newest.get(seq_id) is task:
            del self._newest[seq_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("rows of %s are lost", seq_id, exc_info=error)


async def _run_after(earlier: asyncio.Task[None] | None, step: Callable[[], Awaitable[None]]) -> None:
    if earlier is not None:
        await asyncio.wait({earlier})
    await step()

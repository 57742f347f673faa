"""The task of one sequence: begun once, ended from outside, but never while it gives everything back."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from slipstream.errors import SlipstreamError


class SequenceTask(ABC):
    """Runs as one task from admission until nothing of it is held. `end` is the only way to stop it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        self._leaving = False  # gives everything back: not to be disturbed any more
        self._end_error: SlipstreamError | None = None

    def start(self) -> asyncio.Task[None]:
        """Begin; the task ends, without an exception, when nothing is held any more."""
        self._task = asyncio.create_task(self._run(), name=self._name)
        return self._task

    def end(self, error: SlipstreamError | None = None) -> None:
        """Stop and give everything back: as aborted, or failed with `error`.

        Idempotent, returns at once; the task tells when it is done.
        """
        if not self._ending and self._task is not None:
            self._ending = True
            self._end_error = error
            # Not before its first turn: its `finally` must be entered.
            asyncio.get_running_loop().call_soon(self._cancel)

    async def wait_ended(self) -> None:
        """Return when nothing is held. A cancelled waiter stops nothing."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _cancel(self) -> None:
        """The task may have come to its own end since `end`: a release is never cut short."""
        if not self._leaving and self._task is not None:
            self._task.cancel()

    @abstractmethod
    async def _run(self) -> None:
        """The work. Sets `_ending` when there is nothing to stop any more, `_leaving` before giving back."""

"""The task of one sequence: it starts once, `end` stops it, and no cancel interrupts its clean-up."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from libs.common.telemetry.logs import LoggedRequest, log_request
from libs.worker.requests.attempts import client_request_id
from slipstream.errors import SlipstreamError


class SequenceTask(ABC):
    """Runs as one task from admission to the release of everything it holds. Only `end` stops it."""

    def __init__(self, name: str, *, request_id: str) -> None:
        """`request_id` is the worker's; lines of the log name the client's."""
        self._name = name
        self._logged = LoggedRequest(client_request_id(request_id))
        self._task: asyncio.Task[None] | None = None
        self._ending = False
        self._cleaning_up = False  # from then on `end` does not cancel the task
        self._end_error: SlipstreamError | None = None

    def start(self) -> asyncio.Task[None]:
        """Start the task, which ends without an exception once it holds nothing."""
        with log_request(self._logged):  # of the task too, which takes the context over
            self._task = asyncio.create_task(self._run(), name=self._name)
        return self._task

    def end(self, error: SlipstreamError | None = None) -> None:
        """Have the task stop as aborted, or failed with `error`, and release everything.

        Idempotent. Returns at once; `wait_ended` waits for the release.
        """
        if not self._ending and self._task is not None:
            self._ending = True
            self._end_error = error
            # Cancelling before the first iteration of the task would skip its `finally`.
            asyncio.get_running_loop().call_soon(self._cancel)

    async def wait_ended(self) -> None:
        """Return when the task holds nothing. Cancelling the waiter does not stop the task."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def _cancel(self) -> None:
        """Cancel the task unless it has begun its clean-up since `end`."""
        if not self._cleaning_up and self._task is not None:
            self._task.cancel()

    @abstractmethod
    async def _run(self) -> None:
        """Do the work.

        Sets `_ending` when it has passed its last stop, `_cleaning_up` before its clean-up.
        """

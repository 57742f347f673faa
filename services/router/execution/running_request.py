"""One admitted request, from its place to the last release on its workers.

It runs in a task of its own, apart from the call that brought it: whatever becomes of that call, `end` stops
the task, and the workers are told by tasks that nothing cancels.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from services.router.admission.gate import AdmissionTicket
from services.router.execution.event_queue import ResponseQueue
from services.router.execution.generation import GenerationTask
from services.router.placement.types import PlacementDecision
from slipstream import errors

log = logging.getLogger(__name__)


class RunningRequest:
    """One admitted request. Iterate over `pipe`; call `end` when it is not wanted any more."""

    def __init__(self, request_id: str, *, movable: bool = False) -> None:
        """`movable`: its client goes on at another router when this one drains."""
        self.request_id = request_id
        self.movable = movable
        self.pipe = ResponseQueue()
        self.released = asyncio.Event()
        self.generation: GenerationTask | None = None  # from when it is let in until it is over
        self.place: AdmissionTicket | None = None
        self._decision: PlacementDecision | None = None  # of what is over
        self._task: asyncio.Task[errors.SlipstreamError | None] | None = None
        self._releases: set[asyncio.Task[None]] = set()
        self._ended_by: errors.SlipstreamError | None = None

    def decision(self) -> PlacementDecision | None:
        """Where it runs and why, as far as that is decided."""
        return self._decision if self.generation is None else self.generation.decision

    def start(
        self, work: Coroutine[Any, Any, errors.SlipstreamError | None]
    ) -> asyncio.Task[errors.SlipstreamError | None]:
        """Begin."""
        self._task = asyncio.create_task(work, name=f"request-{self.request_id}")
        return self._task

    def end(self, error: errors.SlipstreamError | None = None) -> None:
        """Stop the request everywhere; `error` is what a reader still there is told. Idempotent."""
        if self._task is not None and not self._task.done() and self._ended_by is None:
            self._ended_by = error or errors.Aborted("the request was aborted")
            self._task.cancel()

    def preempt(self) -> None:
        """Stop the work that has shown nothing yet: it will begin anew."""
        if self._task is not None and not self._task.done() and self._ended_by is None:
            self._task.cancel()

    def take_preemption(self) -> bool:
        """Whether a cancel that just came means: begin anew. Clears it."""
        if self._ended_by is not None or self.place is None or not self.place.preempted:
            return False
        self.place.preempted = False
        return True

    def spawn_release(self, work: Coroutine[None, None, None]) -> None:
        """Run what frees something on a worker; it is never cancelled."""
        task = asyncio.create_task(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    @property
    def releasing(self) -> bool:
        """Whether a worker may still hold something of it."""
        return bool(self._releases)

    async def settle(self) -> None:
        """Wait until the workers hold nothing of it."""
        while self._releases:
            await asyncio.wait(self._releases)

    def over(self) -> None:
        """Its task is done. What it worked with is let go of here, not at the next look for cycles: the
        prompt, the answer and all that was weighed for them."""
        self._decision, self.generation = self.decision(), None
        self._task = None
        self.pipe.on_first_delta = None
        if self.place is not None:
            self.place.over()

    @property
    def ended_by(self) -> errors.SlipstreamError:
        """Why it was stopped from outside."""
        return self._ended_by or errors.Aborted("the request was aborted")


async def execute(
    run: RunningRequest, begin_anew: Callable[[], GenerationTask]
) -> errors.SlipstreamError | None:
    """Wait for the place, run to the end; returns why it failed, if it did."""
    place = run.place
    assert place is not None
    try:
        while True:
            await place.admitted()
            place.began = True
            try:
                await begin_anew().run()
                return None
            except asyncio.CancelledError:
                if not run.take_preemption():
                    raise
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
    except errors.SlipstreamError as error:
        # Only its words are told. It knows the frames that it passed, and some of them know it.
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    except Exception:
        log.exception("request %s failed", run.request_id)
        return errors.Internal("internal error")

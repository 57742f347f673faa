"""One admitted request, from its admission ticket to the last release on its workers.

The request runs in its own task, not in that of the client's call. `end` stops the request's task, and other
tasks, which are never cancelled, release the workers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from libs.common.telemetry import tracing
from libs.common.telemetry.counters import Counters
from services.router.admission.gate import AdmissionTicket
from services.router.execution.event_queue import ResponseQueue
from services.router.execution.generation import GenerationTask
from services.router.execution.policies.job_holds import JobHold, MetJobs
from services.router.execution.request_stats import CountedTokens
from services.router.metering.metering import MeteredRequest
from services.router.placement.types import PlacementDecision
from services.router.recording.timeline import RequestTimeline
from slipstream import errors
from slipstream.sampling import OutputConstraint

log = logging.getLogger(__name__)


class RunningRequest:
    """One admitted request. Its handler reads from `sink`, and calls `end` when the client is gone."""

    def __init__(
        self,
        request_id: str,
        *,
        movable: bool = False,
        key_sha256: bytes = b"",
        text_chars: int = 0,
        timeline: RequestTimeline | None = None,
    ) -> None:
        """`movable`: the client can resume at another router when this one drains.

        `key_sha256`: of the API key by which it runs; empty: none. `text_chars`: of its input, see
        `GenerationRequest`."""
        self.request_id = request_id
        self.text_chars = text_chars
        self.key_sha256 = key_sha256
        self.timeline = timeline or RequestTimeline(request_id)
        self.movable = movable
        self.sink = ResponseQueue()
        self.released = asyncio.Event()
        self.generation: GenerationTask | None = None  # while the request is admitted and not over
        self.constraint: OutputConstraint | None = None  # what the answer may be
        self.ticket: AdmissionTicket | None = None
        self.metered: MeteredRequest | None = None
        self.hold: JobHold | None = None  # of a job
        self.met_jobs = MetJobs()  # of a live request
        self.counted = CountedTokens()
        self.is_measured = True  # or certainly within the context
        self.measuring: asyncio.Task[None] | None = None  # of what is not, while it is queued
        self._has_waited = False  # for its first admission
        self._decision: PlacementDecision | None = None  # the last one of a finished request
        self._task: asyncio.Task[errors.SlipstreamError | None] | None = None
        self._releases: set[asyncio.Task[None]] = set()
        self._ended_by: errors.SlipstreamError | None = None
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def figures(self) -> ResponseQueue:
        """See `HeldRun`."""
        return self.sink

    def decision(self) -> PlacementDecision | None:
        """The placement of the latest attempt, if any."""
        return self._decision if self.generation is None else self.generation.decision

    def start(
        self, work: Coroutine[Any, Any, errors.SlipstreamError | None], *, deadline_s: float | None = None
    ) -> asyncio.Task[errors.SlipstreamError | None]:
        """Start the request's task. `deadline_s` is on the event loop's clock."""
        self._task = asyncio.create_task(work, name=f"request-{self.request_id}")
        if deadline_s is not None:
            self._deadline = asyncio.get_running_loop().call_at(deadline_s, self.end_at_deadline)
        return self._task

    def end_at_deadline(self) -> None:
        """Stop the request because its deadline passed."""
        reason = self.ticket.late_reason if self.ticket is not None else ""
        passed = "the request's deadline passed" + (f": {reason}" if reason else "")
        self.end(self.final_error(errors.DeadlineExceeded(passed)))

    def final_error(self, error: errors.SlipstreamError) -> errors.SlipstreamError:
        """The error with which the request ends. A job that was held runs again: it had less time."""
        if self.hold is not None and self.hold.was_held and isinstance(error, errors.DeadlineExceeded):
            return errors.Overloaded("live requests held the job until its deadline", retry_after_ms=1000)
        return error

    def end(self, error: errors.SlipstreamError | None = None) -> None:
        """Stop the request on the router and its workers. The sink's reader gets `error`. Idempotent."""
        if self._task is not None and not self._task.done() and self._ended_by is None:
            self._ended_by = error or errors.Aborted("the request was aborted")
            self._cancel(self._task)

    @property
    def goes_on(self) -> bool:
        """Whether another router takes the request when this one drains: its client or its job asks again."""
        return self.movable or self.hold is not None

    @property
    def is_queued(self) -> bool:
        """Whether the request waits for its first admission."""
        return self.ticket is not None and not self.ticket.began and not self._has_waited

    @property
    def is_stopped(self) -> bool:
        """Whether `end` stopped the request before it was over."""
        return self._ended_by is not None

    @property
    def is_suspended(self) -> bool:
        """See `GenerationTask.is_suspended`."""
        return self.generation is not None and self.generation.is_suspended

    def suspend(self) -> None:
        """Leave the workers until the client reads again, or the job is not held any more."""
        if self.generation is not None and not self.is_stopped:
            self.generation.suspend()

    def preempt(self) -> None:
        """Stop the request before its first token. It waits for admission again and restarts."""
        if self._task is not None and not self._task.done() and self._ended_by is None:
            self._cancel(self._task)

    def end_wait(self, counters: Counters, now_s: float) -> None:
        """Observe how long a live request waited for its first admission, or for its end before. Idempotent.

        A client that gives up waiting counts: it waits longest under overload.
        """
        if not self._has_waited and self.hold is None:
            queued_s, span = now_s - self.timeline.began_s, tracing.exported_context()
            counters.observe("slipstream_request_queue_seconds", queued_s, span=span)
        self._has_waited = True

    def _cancel(self, task: asyncio.Task[errors.SlipstreamError | None]) -> None:
        if self.generation is not None:
            self.generation.close()  # ignores tokens that arrive before the cancelled task runs
        task.cancel()

    def clear_preemption(self) -> bool:
        """Whether the last cancel was a preemption. Clears the ticket's mark."""
        if self._ended_by is not None or self.ticket is None or not self.ticket.preempted:
            return False
        self.ticket.preempted = False
        return True

    def spawn_release(self, work: Coroutine[None, None, None]) -> None:
        """Run a coroutine that releases an attempt, in a task that is never cancelled."""
        task = asyncio.create_task(work)
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    @property
    def releasing(self) -> bool:
        """Whether a worker may still hold something of the request."""
        return bool(self._releases)

    async def wait_released(self) -> None:
        """Wait until the workers hold nothing of the request."""
        while self._releases:
            await asyncio.wait(self._releases)

    def end_metering(self, error: BaseException | None) -> None:
        """Count what the request has used, and end its place in the limits of its key."""
        if self.metered is not None:
            self.metered.end(error)

    def finish(self) -> None:
        """Drop the finished task, the prompt and the answer now, not at the next garbage collection."""
        self._decision, self.generation = self.decision(), None
        self._task = None
        if self.measuring is not None:
            self.measuring.cancel()
            self.measuring = None
        if self._deadline is not None:
            self._deadline.cancel()
        if self.ticket is not None:
            self.ticket.over()

    @property
    def ended_by(self) -> errors.SlipstreamError:
        """The error of the `end` that stopped the request."""
        return self._ended_by or errors.Aborted("the request was aborted")


async def execute(
    run: RunningRequest, make_generation: Callable[[], GenerationTask]
) -> errors.SlipstreamError | None:
    """Wait for admission and run the request. Returns the request's error, or None."""
    ticket = run.ticket
    assert ticket is not None
    try:
        while True:
            await ticket.admitted()
            ticket.began = True
            try:
                await make_generation().run()
                return None
            except asyncio.CancelledError:
                if not run.clear_preemption():
                    raise
                run.timeline.note("preempted")
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
    except errors.SlipstreamError as error:
        # Without traceback and cause, to avoid reference cycles through the frames.
        error.__cause__ = error.__context__ = None
        return run.final_error(error).with_traceback(None)
    except Exception:
        log.exception("request %s failed", run.request_id)
        return errors.Internal("internal error")

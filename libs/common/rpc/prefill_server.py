"""The worker's side of `PrefillService.Prefill`: many prompts on one stream, isolated from each other.

    streams = PrefillServer(follow)       # follow(request) yields the responses of one prompt
    async def Prefill(self, requests, context):
        async for frame in streams.serve(requests): yield frame

A frame holds all events of one event-loop iteration, because reading a frame costs the router the same
whatever it holds. An error of one prompt fails that prompt only. When the stream ends, it closes the
generators of all its prompts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from libs.common.rpc import tracing
from slipstream import errors
from slipstream.rpc.rpc_errors import to_failure
from slipstream.v1 import prefill_pb2

log = logging.getLogger(__name__)

Follow = Callable[[prefill_pb2.StartPrefill], AsyncGenerator[prefill_pb2.PrefillEvent, None]]


class PrefillServer:
    """See the module's text."""

    def __init__(self, follow: Follow) -> None:
        self._follow = follow

    async def serve(
        self, requests: AsyncIterator[prefill_pb2.PrefillRequest]
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """The frames of one stream until its caller ends it and its prompts are done."""
        stream = _Stream(self._follow)
        reader = asyncio.create_task(stream.read(requests), name="prefill stream")
        try:
            while (frame := await stream.next_frame()) is not None:
                yield frame
        finally:
            reader.cancel()
            stream.cancel_all()


class _Stream:
    def __init__(self, follow: Follow) -> None:
        self._follow = follow
        self._prompts: dict[int, asyncio.Task[None]] = {}
        self._events: list[prefill_pb2.PrefillEvent] = []
        self._changed = asyncio.Event()
        self._no_more_starts = False

    async def next_frame(self) -> prefill_pb2.PrefillResponse | None:
        """All events that are ready, at least one; None at the end of the stream."""
        while True:
            if self._events:
                await asyncio.sleep(0)  # joins the events of this event-loop iteration
                events, self._events = self._events, []
                return prefill_pb2.PrefillResponse(events=events)
            if self._no_more_starts and not self._prompts:
                return None
            self._changed.clear()
            await self._changed.wait()

    async def read(self, requests: AsyncIterator[prefill_pb2.PrefillRequest]) -> None:
        """Start and cancel prompts by the router's commands."""
        try:
            async for request in requests:
                for start in request.starts:
                    self._start(start)
                for handle in request.cancels:
                    prompt = self._prompts.get(handle)
                    if prompt is not None:
                        prompt.cancel()
        finally:
            self._no_more_starts = True
            self._changed.set()

    def cancel_all(self) -> None:
        """The stream is over."""
        for prompt in self._prompts.values():
            prompt.cancel()

    def _start(self, start: prefill_pb2.StartPrefill) -> None:
        handle = start.handle
        if handle in self._prompts:
            self._fail(handle, errors.FailedPrecondition(f"handle {handle} is in use"))
            return
        task = self._prompts[handle] = asyncio.create_task(self._run(start))
        task.add_done_callback(lambda _: self._ended(handle))

    def _ended(self, handle: int) -> None:
        del self._prompts[handle]
        self._changed.set()

    async def _run(self, start: prefill_pb2.StartPrefill) -> None:
        answered = False
        try:
            attempt = start.attempt
            named: tracing.Attributes = {"request_id": attempt.request_id, "attempt": attempt.attempt}
            with tracing.server_span("prefill", lambda: start.trace, named):
                async with aclosing(self._follow(start)) as events:
                    async for event in events:
                        if event.HasField("first_token"):
                            answered = True
                            _note(event.first_token)
                        event.handle = start.handle
                        self._put(event)
            if not answered:
                raise errors.Unavailable("prefill ended without a token")
        except errors.SlipstreamError as error:
            self._fail(start.handle, error)
        except asyncio.CancelledError:
            # The worker may have cancelled the prompt itself; this event is the router's only notice.
            self._fail(start.handle, errors.Aborted("the prompt was ended"))
            raise
        except Exception:
            log.exception("prefill of %s failed", start.attempt.request_id)
            self._fail(start.handle, errors.Internal("internal error"))

    def _put(self, event: prefill_pb2.PrefillEvent) -> None:
        self._events.append(event)
        self._changed.set()

    def _fail(self, handle: int, error: errors.SlipstreamError) -> None:
        self._put(prefill_pb2.PrefillEvent(handle=handle, failure=to_failure(error)))


def _note(first: prefill_pb2.FirstToken) -> None:
    """Annotate the prompt's span with its times and cached tokens."""
    cached_tokens = sum(cached.tokens for cached in first.cached)
    tracing.annotate(queue_ms=first.queue_ms, compute_ms=first.compute_ms, cached_tokens=cached_tokens)

"""The worker's end of `PrefillService.Prefill`: many prompts on one stream, isolated from each other.

    server = PrefillServer(follow)       # follow(start) yields the events of one prompt
    async def Prefill(self, requests, context):
        async with aclosing(server.serve(requests)) as frames:
            async for frame in frames: yield frame

When the stream ends, it closes the generators of all its prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from libs.common.rpc.multiplexed_server import MultiplexedServer, ServerStream
from libs.common.telemetry import tracing
from slipstream import errors
from slipstream.rpc.rpc_errors import to_failure
from slipstream.v1 import prefill_pb2

Follow = Callable[[prefill_pb2.StartPrefill], AsyncGenerator[prefill_pb2.PrefillEvent, None]]


class PrefillStream(ServerStream[prefill_pb2.StartPrefill, prefill_pb2.PrefillEvent]):
    """The prompts of one router."""

    def __init__(self, follow: Follow) -> None:
        super().__init__()
        self._follow = follow

    # ---- ServerStream

    async def on_request(self, request: prefill_pb2.PrefillRequest) -> None:
        for start in request.starts:
            self.begin(start)
        self.cancel(request.cancels)

    async def join(self) -> None:
        await asyncio.sleep(0)  # for the events of other prompts in this iteration of the event loop

    async def run(self, start: prefill_pb2.StartPrefill) -> None:
        """Pass on a prompt's events under a separate span."""
        attempt = start.attempt
        named: tracing.Attributes = {"request_id": attempt.request_id, "attempt": attempt.attempt}
        try:
            with tracing.server_span("prefill", lambda: start.trace, named):
                async with aclosing(self._follow(start)) as events:
                    if not await self._pass_on(start.handle, events):
                        raise errors.Unavailable("prefill ended without a token")
        except asyncio.CancelledError:
            # The worker may have cancelled the prompt itself; this event is the router's only notice.
            self.fail(start.handle, errors.Aborted("the prompt was ended"))
            raise

    async def _pass_on(self, handle: int, events: AsyncGenerator[prefill_pb2.PrefillEvent, None]) -> bool:
        """Whether the first token was among the events. It annotates the prompt's span."""
        is_answered = False
        async for event in events:
            if event.HasField("first_token"):
                is_answered, first = True, event.first_token
                cached_tokens = sum(cached.tokens for cached in first.cached)
                tracing.annotate(
                    queue_ms=first.queue_ms, compute_ms=first.compute_ms, cached_tokens=cached_tokens
                )
            event.handle = handle
            self.put(event)
        return is_answered

    def failure(self, handle: int, error: errors.SlipstreamError) -> prefill_pb2.PrefillEvent:
        return prefill_pb2.PrefillEvent(handle=handle, failure=to_failure(error))

    def frame(self, events: Sequence[prefill_pb2.PrefillEvent]) -> prefill_pb2.PrefillResponse:
        return prefill_pb2.PrefillResponse(events=events)


class PrefillServer(MultiplexedServer[PrefillStream]):
    """See the module's text."""

    def __init__(self, follow: Follow) -> None:
        super().__init__(lambda: PrefillStream(follow))

"""All that is known of one running request: what was asked, what was generated, and where the answer goes.

Attempts push tokens into the state (`deliver`), which pushes events into the sink at once. While the sink is
full the attempt is paused, and goes on when the sink's reader has made room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.router.admission.gate import AdmissionTicket
from services.router.execution.attempt_types import AttemptSpec
from services.router.execution.context import RouterContext
from services.router.execution.event_queue import ResponseQueue
from services.router.execution.failover import content_digest
from services.router.execution.output_processor import OutputProcessor
from services.router.execution.policies.quarantine import Suspect
from services.router.execution.policies.retry_policy import RetryPolicy
from services.router.execution.request_stats import StatsRecorder
from services.router.execution.sessions import SessionPlacement
from services.router.placement.types import PlacementDecision
from services.router.request.types import Caller
from slipstream.v1 import common_pb2, router_pb2

# Tokens that are written at once. More of them wait for a slow reader together.
_PIECE_TOKENS = 256


class TokenSource(Protocol):
    """Pushes tokens into a state."""

    def pause(self) -> None:
        """Push no more until `resume`."""

    def resume(self) -> None:
        """Push what waits, and what comes from now on."""


@dataclass(slots=True, eq=False)
class RequestState:
    """See the module's text. One for each run of a request, over all its attempts."""

    context: RouterContext
    caller: Caller
    request_id: str
    spec: AttemptSpec
    hashes: Sequence[bytes]  # of the prompt's full blocks
    session: SessionPlacement
    output: OutputProcessor
    stats: StatsRecorder
    sink: ResponseQueue
    ticket: AdmissionTicket | None
    spawn: Callable[[Coroutine[None, None, None]], None]  # runs what must outlive a cancel
    started: router_pb2.GenerateEvent | None  # the answer's first event, until an attempt begins
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    suspect: Suspect = field(default_factory=Suspect)
    decision: PlacementDecision | None = None  # of the latest attempt
    source: TokenSource | None = None  # the attempt that delivers
    is_closed: bool = False  # the task is about to be cancelled: nothing may be shown any more
    _moving_from: str = ""  # the draining worker that the request is moving away from
    _has_shown: bool = False
    _unread_tokens: Sequence[int] = ()  # that the sink had no room for
    _unread_logprobs: Sequence[common_pb2.PositionLogprobs] = ()
    _room: asyncio.Future[None] | None = None  # while the request's task waits for the sink

    def show_started(self) -> None:
        """An attempt began. The answer's first event comes after the prompt, which need not wait for it."""
        started, self.started = self.started, None
        if started is not None and not self.is_closed:
            self.sink.write([started])

    # ---- tokens

    def deliver(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[common_pb2.PositionLogprobs] = (),
        *,
        is_last: bool = False,
    ) -> None:
        """Show tokens now, or when the sink has room. The last ones are kept, to be shown with the end."""
        if not (is_last or self._unread_tokens or len(tokens) > _PIECE_TOKENS or self.sink.is_full):
            self._show(self.output.push(tokens, logprobs))
            return
        self._unread_tokens = [*self._unread_tokens, *tokens]
        self._unread_logprobs = [*self._unread_logprobs, *logprobs]
        if not is_last:
            self._show_unread()
            if self._unread_tokens and self.source is not None:
                self.source.pause()

    def resume(self) -> None:
        """From the sink: it has room again."""
        if self._room is not None:
            if not self._room.done():
                self._room.set_result(None)
            return
        self._show_unread()
        if not self._unread_tokens and self.source is not None:
            self.source.resume()

    async def flush(self) -> None:
        """Show what the sink had no room for."""
        if self._unread_tokens:
            self._show(await self.last_events())

    async def last_events(self) -> list[router_pb2.GenerateEvent]:
        """What is left to be shown, once the sink has room for it: to be written with the end."""
        while self.sink.is_full or len(self._unread_tokens) > _PIECE_TOKENS:
            if self.sink.is_full:
                self._room = asyncio.get_running_loop().create_future()
                try:
                    await self._room
                finally:
                    self._room = None
            else:
                self._show(self._push_piece())
        return self._push_piece()

    def close(self) -> None:
        """Show nothing any more: the task is about to be cancelled."""
        self.is_closed = True

    def _show_unread(self) -> None:
        while self._unread_tokens and not self.sink.is_full:
            self._show(self._push_piece())

    def _push_piece(self) -> list[router_pb2.GenerateEvent]:
        tokens, logprobs = self._unread_tokens, self._unread_logprobs
        self._unread_tokens, self._unread_logprobs = tokens[_PIECE_TOKENS:], logprobs[_PIECE_TOKENS:]
        return self.output.push(tokens[:_PIECE_TOKENS], logprobs[:_PIECE_TOKENS])

    def _show(self, events: Sequence[router_pb2.GenerateEvent]) -> None:
        if not events:
            return
        self.sink.write(events)
        if not self._has_shown:
            self._has_shown = True
            if self.ticket is not None:
                self.ticket.first_token()

    # ---- suspicion: see policies/quarantine.py

    def content(self) -> bytes:
        """Names what the request runs, whatever its id and seed are."""
        spec = self.spec
        return content_digest(
            spec.prompt.ids,
            spec.sampling,
            tenant=self.caller.tenant,
            hashes=self.hashes,
            block_tokens=spec.fingerprint.block_tokens,
        )

    # ---- moves away from workers that drain

    def begin_move(self, worker: str) -> bool:
        """Whether the sequence may leave `worker` now. At most a few move at one time."""
        if not self.context.failover.drain_limiter.acquire(worker):
            return False
        self.end_move()
        self._moving_from = worker
        return True

    def end_move(self) -> None:
        """The request has tokens again, or ended. Idempotent."""
        if self._moving_from:
            self.context.failover.drain_limiter.release(self._moving_from)
            self._moving_from = ""

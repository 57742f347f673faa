"""The state of one running request, over all its attempts: inputs, output, statistics and sink.

A `HedgedAttempt` pushes its winner's tokens into the state (`deliver`), which pushes events into the sink at
once. While the sink is full the state pauses the attempt. It resumes the attempt when the sink's reader has
made room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.router.admission.gate import AdmissionTicket
from services.router.execution.attempt_types import AttemptSpec, without_prompt_logprobs
from services.router.execution.context import RouterContext
from services.router.execution.event_queue import ResponseQueue
from services.router.execution.failover import content_digest
from services.router.execution.output_processor import OutputProcessor
from services.router.execution.policies.context_room import ContextRoom, list_rooms
from services.router.execution.policies.job_holds import JobHold
from services.router.execution.policies.quarantine import Suspect
from services.router.execution.policies.resume_pace import ResumePace
from services.router.execution.policies.retry_policy import RetryPolicy
from services.router.execution.request_stats import StatsRecorder
from services.router.execution.sessions import SessionPlacement
from services.router.placement.types import PlacementDecision
from services.router.recording.timeline import RequestTimeline
from services.router.request.prompt_rows import PromptRows
from services.router.request.types import Caller
from slipstream.errors import Internal
from slipstream.v1 import common_pb2, router_pb2

# The most tokens of one write. Further tokens wait until the sink has room for them.
_PIECE_TOKENS = 256
_PIECE_LOGPROBS = 16  # tokens with log probabilities, which take much longer


class TokenSource(Protocol):
    """Pushes tokens into a state."""

    def pause(self) -> None:
        """Push no tokens until `resume`."""

    def resume(self) -> None:
        """Push the waiting tokens, and later ones as they arrive."""


class Suspendable(Protocol):
    """An attempt that can end before its answer does."""

    def suspend(self) -> None:
        """Leave the workers. The tokens that have arrived stay."""

    def on_listener_error(self, error: Exception) -> None:
        """Fail: what the attempt has brought cannot be written."""


@dataclass(frozen=True, slots=True)
class _PromptDelivery:
    """A piece of the rows of a prompt that a request has to write. See `PendingDelivery`."""

    tenant: Hashable
    state: RequestState

    def deliver(self) -> None:
        self.state.write_waiting()


@dataclass(slots=True, eq=False)
class RequestState:
    """See the module's text. A preempted request gets a new state when it restarts."""

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
    spawn: Callable[[Coroutine[None, None, None]], None]  # runs work that a cancel must not stop
    started: router_pb2.GenerateEvent | None  # the answer's first event, until an attempt begins
    timeline: RequestTimeline = field(default_factory=RequestTimeline)
    retry_policy: RetryPolicy = field(default_factory=RetryPolicy)
    resume_pace: ResumePace = field(default_factory=ResumePace)
    suspect: Suspect = field(default_factory=Suspect)
    decision: PlacementDecision | None = None  # of the latest attempt
    delivering: TokenSource | None = None  # the attempt whose tokens the client gets
    hedged: Suspendable | None = None  # the attempt and its hedge, while they run
    hold: JobHold | None = None  # of a job
    prompt_rows: PromptRows | None = None  # where the client asked for them
    is_suspended: bool = False  # the client reads nothing, and the workers hold nothing
    is_closed: bool = False  # no more events may be written: the task is about to be cancelled
    max_tokens: int = 0  # of the answer; lower than the request's where its workers take less
    _moving_from: str = ""  # the draining worker whose slot the request holds
    _has_shown: bool = False
    _unread_tokens: Sequence[int] = ()  # tokens for which the sink had no room
    _unread_logprobs: Sequence[common_pb2.PositionLogprobs] = ()
    _is_marked: bool = False  # the batcher will ask for the next piece of the prompt's rows
    _room: asyncio.Future[None] | None = None  # while the request's task waits for the sink

    def __post_init__(self) -> None:
        self.max_tokens = self.spec.sampling.max_tokens

    @property
    def rooms(self) -> Sequence[ContextRoom]:
        """The context that workers of the next attempt must take, the one that serves best first."""
        return list_rooms(
            self.spec.output_room,
            prompt_tokens=len(self.spec.prompt),
            emitted_tokens=len(self.output.tokens),
            max_tokens=self.max_tokens,
        )

    def show_started(self) -> None:
        """Write the answer's first event. Called after the prompt was sent, which it must not delay."""
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
        """Write tokens now, or when the sink has room. The last ones wait for `last_events`."""
        if self.prompt_rows is not None and not self.prompt_rows.is_complete:
            raise Internal("a worker sent tokens before all log probabilities of the prompt")
        waits = self._unread_tokens or self._has_rows or self.sink.is_full
        if not (is_last or waits or len(tokens) > _PIECE_TOKENS):
            self._show(self.output.push(tokens, logprobs))
            return
        self._unread_tokens = [*self._unread_tokens, *tokens]
        self._unread_logprobs = [*self._unread_logprobs, *logprobs]
        if not is_last:
            self._show_unread()
            if self._unread_tokens and self.delivering is not None:
                self.delivering.pause()

    def deliver_prompt(self, pieces: Sequence[common_pb2.PromptLogprobs]) -> None:
        """Write rows of the prompt, which come before all tokens, fairly to other requests."""
        if self.prompt_rows is None:
            return
        for piece in pieces:
            self.prompt_rows.add(piece)
        if self.prompt_rows.is_complete and self.spec.sampling.HasField("prompt_logprobs"):
            self.spec = without_prompt_logprobs(self.spec)  # of later attempts
        self._show_unread()

    def resume(self) -> None:
        """Continue after the sink, which calls this, has room again."""
        if self._room is not None:
            if not self._room.done():
                self._room.set_result(None)
            return
        self._show_unread()
        if not self._unread_tokens and self.delivering is not None:
            self.delivering.resume()

    async def flush(self) -> None:
        """Write the tokens for which the sink had no room."""
        if self._unread_tokens:
            self._show(await self.last_events())

    async def last_events(self) -> list[router_pb2.GenerateEvent]:
        """Wait until the sink has room, and return the last events, to be written with `finished`."""
        while self.sink.is_full or self._has_rows or len(self._unread_tokens) > self._piece_tokens:
            if self.sink.is_full:
                self._room = asyncio.get_running_loop().create_future()
                try:
                    await self._room
                finally:
                    self._room = None
            elif self._has_rows:
                self._show_rows()
                await asyncio.sleep(0)
            else:
                self._show(self._push_piece())
        return self._push_piece()

    def close(self) -> None:
        """Write no more events: the task is about to be cancelled."""
        self.is_closed = True

    def _show_unread(self) -> None:
        """Write what waits: a piece of the prompt's rows in each iteration, then the tokens."""
        if self._has_rows and not (self._is_marked or self.sink.is_full):
            self._show_rows()
            if self._has_rows:
                self._is_marked = True
                self.context.fleet.batcher.mark(_PromptDelivery(self.spec.prompt.salt, self))
        while self._unread_tokens and not (self._has_rows or self.sink.is_full):
            self._show(self._push_piece())

    def write_waiting(self) -> None:
        """Continue with the prompt's rows. `TokenBatcher`, which all requests share, must get no error."""
        self._is_marked = False
        if self.is_closed:
            return
        try:
            self.resume()
        except Exception as error:
            if self.hedged is not None:  # else the request's task meets the same error
                self.hedged.on_listener_error(error)

    @property
    def _has_rows(self) -> bool:
        return self.prompt_rows is not None and self.prompt_rows.is_waiting

    def _show_rows(self) -> None:
        assert self.prompt_rows is not None
        self.sink.write([self.prompt_rows.pop_event()])
        self.sink.prompt_rows = self.prompt_rows.taken

    def _push_piece(self) -> list[router_pb2.GenerateEvent]:
        tokens, logprobs, n = self._unread_tokens, self._unread_logprobs, self._piece_tokens
        self._unread_tokens, self._unread_logprobs = tokens[n:], logprobs[n:]
        return self.output.push(tokens[:n], logprobs[:n])

    @property
    def _piece_tokens(self) -> int:
        return _PIECE_LOGPROBS if self._unread_logprobs else _PIECE_TOKENS

    def _show(self, events: Sequence[router_pb2.GenerateEvent]) -> None:
        if not events:
            return
        self.sink.write(events)
        if not self._has_shown:
            self._has_shown = True
            if self.ticket is not None:
                self.ticket.first_token()

    # ---- clients that read nothing, and jobs that wait for live requests

    @property
    def is_held(self) -> bool:
        """Whether it is a job that must wait for live requests."""
        return self.hold is not None and self.hold.is_held

    def suspend(self) -> None:
        """Leave the workers and the place in admission until the client reads again. Idempotent."""
        if self.hedged is not None:
            self.hedged.suspend()

    def leave_admission(self) -> None:
        """Give the place to others: the workers hold nothing of the request."""
        self.is_suspended = True
        self.timeline.note("suspended", tokens=len(self.output.tokens))
        if self.ticket is not None:
            self.ticket.leave(output_tokens=len(self.output.tokens))

    async def wait_for_client(self) -> None:
        """Return when the client has read, and admission lets the request run again. Raises Overloaded.

        A job returns when it is not held any more.
        """
        self.leave_admission()
        if self.hold is not None:  # its reader always reads, but for an answer's start without a token
            await self.hold.wait_freed()
            await self.flush()
        else:
            self.resume_pace.suspended(self.context.clock())
            await self.sink.wait_taken()
            await self.flush()
            await asyncio.sleep(self.resume_pace.wait_s(self.context.clock()))
        if self.ticket is not None:
            await self.ticket.admitted_again()
        self.is_suspended = self._has_shown = False
        self.timeline.note("resumed")

    # ---- quarantine: see policies/quarantine.py

    def content(self) -> bytes:
        """The digest of the request's content, without its id and seed."""
        spec = self.spec
        return content_digest(
            spec.prompt.ids,
            spec.sampling,
            tenant=self.caller.tenant,
            hashes=self.hashes,
            block_tokens=spec.fingerprint.block_tokens,
            is_open=spec.output_room.is_open,
        )

    # ---- moves away from workers that drain

    def begin_move(self, worker: str) -> bool:
        """Take a slot of the drain limiter for leaving `worker`. Returns False if none is free."""
        if not self.context.failover.drain_limiter.acquire(worker):
            return False
        self.end_move()
        self._moving_from = worker
        return True

    def end_move(self) -> None:
        """Free the slot when the request gets tokens again or ends. Idempotent."""
        if self._moving_from:
            self.context.failover.drain_limiter.release(self._moving_from)
            self._moving_from = ""

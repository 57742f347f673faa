"""Runs the choices of one request, and merges their events.

The first choice of each prompt starts at once. The others start when it has its first token. By then the
prompt's KV is in the prefix cache, so that the prompt is encoded and computed once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TypeAlias

from services.router.execution.request_manager import RequestManager
from services.router.execution.running_request import RunningRequest
from services.router.request.types import Caller, GenerationRequest
from slipstream import errors
from slipstream.v1 import router_pb2

log = logging.getLogger(__name__)

# Events of the choice with this index.
ChoiceEvents: TypeAlias = tuple[int, Sequence[router_pb2.GenerateEvent]]


class ChoiceRuns:
    """The running requests of all choices. The reader takes their events, and calls `end` when it leaves."""

    def __init__(
        self,
        manager: RequestManager,
        requests: Sequence[GenerationRequest],
        caller: Caller,
        *,
        n_bytes: int,
        wants_stats: bool,
        is_streamed: bool = True,
    ) -> None:
        self._manager = manager
        self._requests = requests
        self._caller = caller
        self._n_bytes = n_bytes
        self._wants_stats = wants_stats
        self._is_streamed = is_streamed
        self._leaders = leaders_of(requests)
        self._has_token = [asyncio.Event() for _ in requests]
        self._begin_lock = asyncio.Lock()
        self._started: dict[int, RunningRequest] = {}
        self._events: asyncio.Queue[ChoiceEvents | errors.SlipstreamError] = asyncio.Queue(len(requests))
        self._tasks: list[asyncio.Task[None]] = []
        self._n_unfinished = len(requests)
        self._ended_by: errors.SlipstreamError | None = None

    async def start(self) -> None:
        """Start the choices. Raises what refuses the first of them."""
        first = await self._begin(0)
        for index in range(len(self._requests)):
            run = first if index == 0 else None
            self._tasks.append(asyncio.create_task(self._follow(index, run), name=f"choice-{index}"))

    @property
    def first(self) -> RunningRequest:
        """The first choice's request, once started."""
        return self._started[0]

    @property
    def leaders(self) -> frozenset[int]:
        """The choices that compute a prompt: their usage counts it."""
        return frozenset(self._leaders)

    @property
    def is_complete(self) -> bool:
        """Whether `next_events` has returned the end of each choice."""
        return not self._n_unfinished

    async def next_events(self) -> ChoiceEvents | None:
        """Wait for events of one choice; None after the end of all. Raises the error of the first to fail."""
        if not self._n_unfinished:
            return None
        item = self._ended_by or await self._events.get()
        if isinstance(item, errors.SlipstreamError):
            self._ended_by, self._n_unfinished = None, 0
            try:
                raise item
            finally:
                del item  # an error whose traceback refers to it would be a cycle
        if item[1][-1].HasField("finished"):
            self._n_unfinished -= 1
        return item

    def end(self, error: errors.SlipstreamError | None = None) -> None:
        """End all choices, on the workers too. The reader gets `error`. Idempotent."""
        self._ended_by = self._ended_by or error or errors.Aborted("the request was aborted")
        tasks, self._tasks = self._tasks, []  # a cancelled task refers to this object by its traceback
        for task in tasks:
            task.cancel()
        for run in self._started.values():
            run.end(error)

    @property
    def is_stopped(self) -> bool:
        """Whether a choice was stopped before it was over."""
        return any(run.is_stopped for run in self._started.values())

    # ---- for the access log

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all prompts."""
        return sum([run.sink.prompt_tokens for run in self._leading()])

    @property
    def cached_tokens(self) -> int:
        """The tokens of all prompts whose KV a cache supplied."""
        return sum([run.sink.cached_tokens for run in self._leading()])

    @property
    def completion_tokens(self) -> int:
        """The tokens of all choices."""
        return sum([run.sink.completion_tokens for run in self._started.values()])

    @property
    def ttft_ms(self) -> float:
        """The time to the first choice's first token."""
        return self._started[0].sink.ttft_ms if self._started else 0.0

    def _leading(self) -> Sequence[RunningRequest]:
        return [run for index, run in self._started.items() if self._leaders[index] == index]

    async def _begin(self, index: int) -> RunningRequest:
        is_leader = self._leaders[index] == index
        run = await self._manager.begin(
            self._requests[index],
            self._caller,
            n_bytes=self._n_bytes,
            is_checked=not is_leader,
            first=self._started.get(0),
        )
        run.sink.wants_stats = self._wants_stats
        run.sink.holds_start = True
        run.timeline.is_streamed = self._is_streamed
        self._started[index] = run
        return run

    async def _follow(self, index: int, run: RunningRequest | None) -> None:
        """Move the events of a choice into the queue, whose bound holds up choices that are not read."""
        leader = self._leaders[index]
        try:
            if leader != index:
                await self._has_token[leader].wait()
            if run is None:
                async with self._begin_lock:
                    await asyncio.sleep(0)  # others are served between two choices that begin
                run = await self._begin(index)
            while True:
                events = await run.sink.next_events()
                if not events:
                    raise errors.Internal("the answer has no end")
                if not _is_prompt_alone(events):
                    self._has_token[index].set()
                await self._events.put((index, events))
                if events[-1].HasField("finished"):
                    return
        except errors.SlipstreamError as error:
            # Without traceback and cause, to avoid reference cycles through the frames.
            error.__cause__ = error.__context__ = None
            await self._events.put(error.with_traceback(None))
        except Exception:
            log.exception("choice %d failed", index)
            await self._events.put(errors.Internal("internal error"))


def _is_prompt_alone(events: Sequence[router_pb2.GenerateEvent]) -> bool:
    """Whether the events come before the first token: the prompt's KV may be incomplete."""
    last = events[-1]
    return last.HasField("delta") and bool(last.delta.prompt_logprobs) and not last.delta.completion_tokens


def leaders_of(requests: Sequence[GenerationRequest]) -> Sequence[int]:
    """The index of the first request with the same input, for each request."""
    first: dict[int, int] = {}
    return [first.setdefault(id(request.input), index) for index, request in enumerate(requests)]


def sum_usage(usages: Sequence[router_pb2.Usage], leaders: frozenset[int]) -> router_pb2.Usage:
    """The usage of an answer: the tokens of all choices, and each prompt once."""
    total = router_pb2.Usage()
    for index, usage in enumerate(usages):
        total.completion_tokens += usage.completion_tokens
        total.reasoning_tokens += usage.reasoning_tokens
        if usage.HasField("cost"):  # without the prompt, where another choice paid it
            total.cost.currency = usage.cost.currency
            total.cost.amount_pico += usage.cost.amount_pico
        if index in leaders:
            total.prompt_tokens += usage.prompt_tokens
            total.cached_tokens += usage.cached_tokens
            total.cached.extend(usage.cached)
    return total

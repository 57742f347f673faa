"""Streams of many kinds with known answers, for runs during which a fault is injected.

load = mixed_requests(50, tokens=200)
expected = [answer_of(run) for run in await run_streams(client, load)]      # without a fault
runs = await run_streams(client, load)                                      # a fault during this run
problems = wrong(runs, expected)
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.replies import Reply

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Looks up the {name} of an order.",
            "parameters": {"type": "object", "properties": {"id": {"type": "string"}}},
        },
    }
    for name in ("status", "parcel")
]


@dataclass(frozen=True, slots=True)
class FaultRequest:
    """One request of the load: the arguments of `stream_chat`."""

    messages: Sequence[Mapping[str, Any]]
    arguments: Mapping[str, Any]


@dataclass(slots=True)
class FaultRun:
    """The outcome of a request. `arrivals` are (monotonic seconds, tokens emitted so far); `moved`: the
    stream ended at another router than it began at."""

    reply: Reply
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    error: str = ""
    moved: bool = False


def mixed_requests(count: int, *, tokens: int, words: int = 40) -> list[FaultRequest]:
    """Greedy, seeded, penalised, unseeded, stop-string and tool-forced requests in turn, all different."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 11},
        {
            "temperature": 1.0,
            "seed": 12,
            "presence_penalty": 0.6,
            "frequency_penalty": 0.4,
            "top_logprobs": 2,
        },
        {"temperature": 0.9},  # the seed derives from the request's id
        {"temperature": 1.0, "seed": 13, "stop": ["zq", "\nX"]},
        {"temperature": 1.0, "seed": 14, "tools": TOOLS, "tool_choice": "required"},
        {
            "temperature": 0.0,
            "tools": TOOLS,
            "tool_choice": {"type": "function", "function": {"name": "parcel"}},
        },
    )
    requests = []
    for number in range(count):
        text = f"Customer {number} asks again: " + " ".join(f"order {number * 7 + i}" for i in range(words))
        arguments = {**kinds[number % len(kinds)], "max_tokens": tokens, "ignore_eos": True}
        arguments |= {"request_id": f"fault-{number}", "session": f"fault-{number}"}
        requests.append(FaultRequest([{"role": "user", "content": text}], arguments))
    return requests


async def run_streams(
    client: AsyncClient,
    requests: Sequence[FaultRequest],
    *,
    on_event: Callable[[int], None] = lambda _tokens: None,
    stagger_s: float = 0.0,
    timeout_s: float = 180.0,
) -> list[FaultRun]:
    """Run all requests, each `stagger_s` after the previous one. `on_event` gets the tokens an event adds."""

    async def run(number: int, request: FaultRequest) -> FaultRun:
        await asyncio.sleep(number * stagger_s)
        return await _run(client, request, on_event, timeout_s)

    return list(await asyncio.gather(*(run(number, request) for number, request in enumerate(requests))))


async def _run(
    client: AsyncClient, request: FaultRequest, on_event: Callable[[int], None], timeout_s: float
) -> FaultRun:
    stream = client.stream_chat(request.messages, timeout_s=timeout_s, **request.arguments)
    run, began_at = FaultRun(stream.reply), stream.endpoint
    emitted = 0
    try:
        async for event in stream:
            run.arrivals.append((time.monotonic(), event.completion_tokens))
            on_event(event.completion_tokens - emitted)
            emitted = event.completion_tokens
    except errors.SlipstreamError as error:
        run.error = f"{type(error).__name__}: {error.message}"
    run.reply, run.moved = stream.reply, stream.endpoint != began_at
    return run


@dataclass(frozen=True, slots=True)
class Answer:
    """The parts of a reply that no fault may change. Log probabilities count by their tokens alone: steps of
    another shape round the values differently."""

    message: Mapping[str, Any]
    finish_reason: str
    completion_tokens: int
    tokens: tuple[bytes, ...]


def answer_of(run: FaultRun) -> Answer:
    """The answer as the client received it."""
    reply = run.reply
    return Answer(
        message=reply.as_message(),
        finish_reason=reply.finish_reason,
        completion_tokens=reply.usage.completion_tokens if reply.usage is not None else -1,
        tokens=tuple(item.token_bytes for item in reply.logprobs),
    )


def wrong(runs: Sequence[FaultRun], expected: Sequence[Answer]) -> list[str]:
    """One line for each request that failed or has another answer than expected."""
    problems = []
    for number, (run, answer) in enumerate(zip(runs, expected, strict=True)):
        if run.error:
            problems.append(f"request {number} failed: {run.error}")
        elif (got := answer_of(run)) != answer:
            fields = [name for name in Answer.__slots__ if getattr(got, name) != getattr(answer, name)]
            attempts = run.reply.stats.attempts if run.reply.stats is not None else 0
            problems.append(f"request {number} differs after {attempts} attempts in {', '.join(fields)}")
    return problems


def longest_gap_s(run: FaultRun, *, after_s: float = 0.0) -> float:
    """The longest time without a token that ends after `after_s`, in seconds; 0 without one."""
    times = [arrival for arrival, _ in run.arrivals]
    gaps = [t1 - t0 for t0, t1 in itertools.pairwise(times) if t1 > after_s]
    return max(gaps, default=0.0)

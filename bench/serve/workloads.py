"""The workloads of the serving benchmark: what clients send, and the log of what comes back."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.request_log import RequestLog
from slipstream.async_client import AsyncClient, AsyncStream
from slipstream.errors import SlipstreamError

# Common words that every tokenizer trained on English splits into few tokens.
WORDS = [
    "order",
    "status",
    "refund",
    "please",
    "ticket",
    "today",
    "thanks",
    "check",
    "number",
    "email",
    "help",
]


async def measure(stream: AsyncStream, clock: Any = time.perf_counter) -> RequestLog:
    """Read one stream to its end and log the arrivals of its tokens."""
    log = RequestLog(sent_s=clock())
    try:
        async for event in stream:
            log.arrivals.append((clock(), event.completion_tokens))
    except SlipstreamError as error:
        log.error = type(error).__name__
        return log
    usage, stats = stream.reply.usage, stream.reply.stats
    if usage is not None and stats is not None:
        log.prompt_tokens, log.cached_tokens = usage.prompt_tokens, usage.cached_tokens
        log.completion_tokens, log.decode_steps = usage.completion_tokens, stats.decode_steps
        log.acceptance_length = stats.acceptance_length
    return log


async def run_sessions(
    client: AsyncClient, dialogues: Sequence[Any], *, rate_per_s: float, seed: int
) -> list[RequestLog]:
    """Open loop: each arrival is a session, which sends the recorded user messages turn by turn."""
    random_ = random.Random(seed)

    async def session(index: int, dialogue: Any) -> list[RequestLog]:
        logs = []
        for turn, message in enumerate(dialogue.messages):
            if message["role"] != "assistant":
                continue
            stream = client.stream_chat(
                dialogue.messages[:turn],
                tools=dialogue.tools,
                session=f"bench-{seed}-{index}",
                temperature=0.0,
                max_tokens=160,
            )
            logs.append(await measure(stream))
        return logs

    tasks = []
    for index, dialogue in enumerate(dialogues):
        tasks.append(asyncio.create_task(session(index, dialogue)))
        await asyncio.sleep(random_.expovariate(rate_per_s))
    return [log for logs in await asyncio.gather(*tasks) for log in logs]


async def run_streams(
    client: AsyncClient, *, streams: int, requests: int, prompt_words: int, output_tokens: int, seed: int
) -> list[RequestLog]:
    """Closed loop: `streams` concurrent requests with different prompts."""
    queue = iter(range(requests))

    async def worker() -> list[RequestLog]:
        logs = []
        for index in queue:
            random_ = random.Random(seed * 100_003 + index)
            prompt = " ".join(random_.choices(WORDS, k=prompt_words))
            request = client.stream_complete(
                prompt, temperature=0.0, max_tokens=output_tokens, ignore_eos=True
            )
            logs.append(await measure(request))
        return logs

    done = await asyncio.gather(*(worker() for _ in range(streams)))
    return [log for logs in done for log in logs]


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One assistant turn of a held-out dialogue that is to be written."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]


def held_out_turns(n_turns: int, *, first: int = 0) -> list[ChatTurn]:
    """One turn of each dialogue from number `first` on, so that no prompt continues another one."""
    from models.helpdesk.dialogues import generate_dialogues
    from models.settings import HELD_OUT_SEED

    turns = []
    for number, dialogue in enumerate(generate_dialogues(HELD_OUT_SEED, first + n_turns)):
        if number >= first:
            check = dialogue.checks[number % len(dialogue.checks)]
            turns.append(ChatTurn(dialogue.messages[: check.index], dialogue.tools))
    return turns


async def run_turns(
    client: AsyncClient, turns: Sequence[ChatTurn], *, streams: int, output_tokens: int
) -> list[RequestLog]:
    """Closed loop: `streams` concurrent clients, each with the next turn when its last one has ended."""
    queue = iter(turns)

    async def worker() -> list[RequestLog]:
        return [
            await measure(
                client.stream_chat(turn.messages, tools=turn.tools, temperature=0.0, max_tokens=output_tokens)
            )
            for turn in queue
        ]

    done = await asyncio.gather(*(worker() for _ in range(streams)))
    return [log for logs in done for log in logs]

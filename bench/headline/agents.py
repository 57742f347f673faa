"""Open-loop load of agents: sessions arrive as a Poisson process, and each sends its turns one after another.

A session begins with a long prompt. Each turn repeats the whole history and adds to it, as agents do. The
answers have a fixed length, whatever the model says.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.request_log import RequestLog
from bench.serve.workloads import WORDS, measure
from slipstream.async_client import AsyncClient

# The further arguments of a request: of the session with this index, its turn with this index.
RequestOptions = Callable[[int, int], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """Sessions and their shape. `tokens_per_word`: of the model's tokenizer, for the words of bench.serve."""

    rate_per_s: float
    sessions: int
    turns: int
    first_prompt_tokens: int
    turn_tokens: int
    output_tokens: int
    think_s: float  # between an answer and the session's next request
    seed: int
    tokens_per_word: float = 1.0


def arrivals_s(load: AgentLoad) -> Sequence[float]:
    """When each session arrives, from the start. The same for every variant of a run."""
    chance = random.Random(load.seed)
    times, now_s = [], 0.0
    for _ in range(load.sessions):
        times.append(now_s)
        now_s += chance.expovariate(load.rate_per_s)
    return times


def words_of(load: AgentLoad, session: int, turn: int) -> str:
    """What the session's user adds in this turn. No two sessions share a prefix."""
    chance = random.Random(f"{load.seed}/{session}/{turn}")
    tokens = load.first_prompt_tokens if turn == 0 else load.turn_tokens
    return " ".join(chance.choices(WORDS, k=max(1, round(tokens / load.tokens_per_word))))


async def run_agents(client: AsyncClient, load: AgentLoad, options: RequestOptions) -> list[RequestLog]:
    """Run all sessions to their ends. A request that fails ends its session."""

    async def session(index: int, arrival_s: float) -> list[RequestLog]:
        await asyncio.sleep(arrival_s)
        logs: list[RequestLog] = []
        history = ""
        for turn in range(load.turns):
            if turn:
                await asyncio.sleep(load.think_s)
            history += f"{words_of(load, index, turn)}\n"
            stream = client.stream_complete(
                history,
                max_tokens=load.output_tokens,
                ignore_eos=True,
                temperature=0.0,
                **options(index, turn),  # type: ignore[arg-type]
            )
            log = await measure(stream, time.perf_counter)
            logs.append(log)
            if log.error:
                break
            history += stream.reply.text
        return logs

    arrivals = enumerate(arrivals_s(load))
    done = await asyncio.gather(*(session(index, at_s) for index, at_s in arrivals))
    return [log for logs in done for log in logs]

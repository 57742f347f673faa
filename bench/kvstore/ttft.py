"""Time to first token of a conversation's second turn, by where its first turn's KV is.

    python -m bench.kvstore.ttft                      # starts a local cluster of the shipped model
    python -m bench.kvstore.ttft --prompt-tokens 2000,4000,8000 --json

    nothing    the first turn was never seen: all of the prompt is computed
    worker     its KV is in the pages of the prefill worker that gets the second turn
    dram       it is in the KV store's memory only: the worker that computed it was started again
    nvme       it is on the KV store's disk only: the store was started again too

The last two are remote hits: the bytes move by the KV transport. A run in which the KV came from
somewhere else than its row says fails.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from bench.command_line import bench_parser
from bench.ledgers import held, statuses
from bench.progress import say
from bench.serve.workloads import WORDS
from slipstream.async_client import AsyncClient
from slipstream.operator_access import operator_dial
from supervisor.cluster import ClusterSupervisor
from supervisor.configuration.plan import ClusterConfig

FIRST, OTHER, STORE = "prefill-0", "prefill-1", "kvstore-0"
SCENARIOS = ("nothing", "worker", "dram", "nvme")
_QUIET_S = 120.0
_BLOCKS = ("slipstream_kvstore_blocks_dram", "slipstream_kvstore_blocks_nvme")


@dataclass(slots=True)
class TimedConversation:
    """Messages so far, and what the second turn took."""

    messages: list[dict[str, Any]]
    ttft_ms: float = 0.0
    prompt_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)


class TtftBench:
    """The cluster under test and a client."""

    def __init__(self, cluster: ClusterSupervisor, client: AsyncClient, *, seed: int) -> None:
        self._cluster, self._client = cluster, client
        self._random = random.Random(seed)
        self._words_a_token = 0.7
        record = cluster.record()
        self._workers, self._dial = record.service_endpoints(), operator_dial(Path(record.run_dir))

    async def run(self, prompt_tokens: Sequence[int], *, rounds: int) -> list[dict[str, Any]]:
        """One row for each length and scenario."""
        await self._calibrate()
        rows = []
        for n_tokens in prompt_tokens:
            for scenario in SCENARIOS:
                talks = [await self._first_turn(scenario, n_tokens) for _ in range(rounds)]
                await self._between(scenario)
                for talk in talks:
                    await self._turn(talk, FIRST if scenario == "worker" else OTHER)
                rows.append(_row(scenario, n_tokens, talks))
                if set(rows[-1]["tiers"]) != {scenario} - {"nothing"}:
                    raise RuntimeError(f"the KV of {scenario} did not come from there: {rows[-1]}")
                say(str(rows[-1]))
        return rows

    async def _calibrate(self) -> None:
        """Learn how long words are; warm every worker up."""
        for worker in (FIRST, OTHER):
            talk = self._conversation(500)
            await self._turn(talk, worker)
            self._words_a_token = 500 * self._words_a_token / talk.prompt_tokens

    def _conversation(self, n_tokens: int) -> TimedConversation:
        words = self._random.choices(WORDS, k=round(n_tokens * self._words_a_token))
        return TimedConversation([{"role": "user", "content": " ".join(words)}])

    async def _first_turn(self, scenario: str, n_tokens: int) -> TimedConversation:
        talk = self._conversation(n_tokens)
        if scenario == "nothing":
            talk.messages.append({"role": "assistant", "content": "Done."})
        else:
            await self._turn(talk, FIRST)
        talk.messages.append({"role": "user", "content": " ".join(self._random.choices(WORDS, k=12))})
        return talk

    async def _turn(self, talk: TimedConversation, worker: str) -> None:
        started, first_ms = time.perf_counter(), 0.0
        stream = self._client.stream_chat(
            talk.messages,
            temperature=0.0,
            max_tokens=4,
            ignore_eos=True,
            headers={"x-slipstream-prefill": worker},
        )
        async for event in stream:
            if not first_ms and event.completion_tokens:
                first_ms = (time.perf_counter() - started) * 1e3
        usage = stream.reply.usage
        assert usage is not None
        talk.ttft_ms, talk.prompt_tokens, talk.cached = (
            first_ms,
            usage.prompt_tokens,
            dict(usage.cached_by_tier),
        )
        talk.messages.append(stream.reply.as_message())

    async def _between(self, scenario: str) -> None:
        """Wait until everything is stored and quiet; then restart the processes that must forget it."""
        await self._quiet()
        again = {"dram": [FIRST], "nvme": [FIRST, STORE]}.get(scenario, [])
        for instance in again:
            await self._cluster.hold(instance)
            await self._cluster.release(instance)
        if again:
            await self._quiet()
            await asyncio.sleep(2.0)  # workers leave a store that was unavailable alone for a moment

    async def _quiet(self) -> None:
        async with asyncio.timeout(_QUIET_S):
            while True:
                try:
                    seen = await statuses(self._workers, self._dial)
                except grpc.aio.AioRpcError:  # just starting again
                    await asyncio.sleep(0.2)
                    continue
                in_dram, on_disk = (seen[STORE].counters[name] for name in _BLOCKS)
                if on_disk >= in_dram and not any(held(status) for status in seen.values()):
                    return
                await asyncio.sleep(0.05)


def _row(scenario: str, n_tokens: int, talks: Sequence[TimedConversation]) -> dict[str, Any]:
    cached = sum(sum(talk.cached.values()) for talk in talks)
    prompt = sum(talk.prompt_tokens for talk in talks)
    tiers = sorted({tier for talk in talks for tier, tokens in talk.cached.items() if tokens})
    return {
        "scenario": scenario,
        "asked_tokens": n_tokens,
        "prompt_tokens": round(prompt / len(talks)),
        "cached_share": round(cached / prompt, 3),
        "tiers": tiers,
        "ttft_ms": round(statistics.median(talk.ttft_ms for talk in talks), 1),
        "ttft_ms_each": [round(talk.ttft_ms, 1) for talk in talks],
    }


async def measure(prompt_tokens: Sequence[int], *, rounds: int, seed: int = 0) -> list[dict[str, Any]]:
    """Start a cluster, measure, stop it."""
    with tempfile.TemporaryDirectory() as directory:
        config = ClusterConfig(
            run_dir=Path(directory),
            draft_model=None,
            drafters=0,
            decode=1,
            ready_timeout_s=400,
            allow_requested_prefill=True,
        )
        async with AsyncExitStack() as stack:
            cluster = await stack.enter_async_context(ClusterSupervisor(config, say=lambda line: None))
            client = AsyncClient(cluster.record().router_grpc, timeout_s=300)
            await stack.enter_async_context(client)
            return await TtftBench(cluster, client, seed=seed).run(prompt_tokens, rounds=rounds)


def main() -> None:
    """Measure and print."""
    parser = bench_parser("kvstore.ttft", __doc__)
    parser.add_argument(
        "--prompt-tokens",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[2000, 4000, 8000],
    )
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    rows = asyncio.run(measure(asked.prompt_tokens, rounds=asked.rounds))
    if asked.json:
        print(json.dumps(rows))
        return
    print("prompt tokens  KV found in   cached  TTFT ms")
    for row in rows:
        where = ",".join(row["tiers"]) or "nothing"
        print(f"{row['prompt_tokens']:13}  {where:12} {row['cached_share']:6.0%}  {row['ttft_ms']:8.1f}")


if __name__ == "__main__":
    main()

"""Many concurrent requests that end at random points: correct tokens or none, and no leak."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time

import grpc
import pytest

from libs.engine.core.fake import expected_tokens
from libs.engine.core.fake_head import FakeHead
from libs.engine.step.types import SamplingParams
from services.decode.draft_state import DraftLimits
from services.decode.speculation import RemoteSpeculation
from slipstream.errors import SlipstreamError
from slipstream.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from tests.drafter.nodes import running_drafter
from tests.support.stubs.remote_prompt import RemotePrompt
from tests.worker.kvstore_node import KvstoreNode, running_kvstore
from tests.worker.nodes import (
    Node,
    RouterStream,
    abort_request,
    attempt,
    greedy,
    prefill_request,
    prompt_tokens,
    running_nodes,
    script,
    start_request,
)

GREEDY = SamplingParams(temperature=0.0)
N_REQUESTS = 60
ENDS = ("finish", "finish", "abort", "abort prefill", "cancel prefill", "deadline", "late start")


class Storm:
    def __init__(
        self, rng: random.Random, prefills: list[Node], streams: list[RouterStream], kvstore: KvstoreNode
    ) -> None:
        self.rng = rng
        self.prefills = prefills
        self.streams = streams
        self.kvstore = kvstore
        self.finished = 0

    async def request(self, number: int) -> None:
        """Run one request from its start to a random end."""
        rng, name = self.rng, attempt(f"r{number}")
        end = rng.choice(ENDS)
        # Only a few different prefixes, so that requests share them.
        tokens = prompt_tokens(rng.randrange(5, 120), seed=rng.randrange(3))
        max_tokens = rng.randrange(1, 30)
        prefill, stream = rng.choice(self.prefills), rng.choice(self.streams)
        shared = {
            "attempt": name,
            "sampling": greedy(max_tokens),
            "kvstore_endpoint": self.kvstore.endpoint,
            "deadline_ms": rng.randrange(1, 60) if end == "deadline" else 0,
        }
        # Requests that should finish get long leases for slow machines; the leases of the others expire.
        lease_ms = 60_000 if end == "finish" else 500
        await asyncio.sleep(rng.random() * 0.3)
        prompt = RemotePrompt(prefill.channel, prefill_request(prefill, tokens, **shared, lease_ms=lease_ms))
        # Some prompts are prefilled locally by the decode worker.
        ticket = b""
        answer: list[int] = []
        started = False
        with contextlib.suppress(SlipstreamError, grpc.aio.AioRpcError, asyncio.CancelledError):
            async for event in prompt:
                if event.HasField("opened"):
                    ticket = event.opened.ticket
                    if end != "late start":
                        started = await self._start(stream, tokens, shared, ticket)
                    if end == "cancel prefill":
                        prompt.call.cancel()
                elif event.HasField("first_token"):
                    answer = [event.first_token.token_id]
        if end == "late start":
            await asyncio.sleep(rng.random() * 0.1)
            started = await self._start(stream, tokens, shared, ticket)
        if end == "abort prefill":
            await asyncio.sleep(rng.random() * 0.05)
            await prefill_pb2_grpc.PrefillServiceStub(prefill.channel).AbortPrefill(
                prefill_pb2.AbortPrefillRequest(attempt=name)
            )
        if end == "abort":
            await asyncio.sleep(rng.random() * 0.05)
            await stream.write(abort_request(name.request_id, name.attempt))
        if not started:
            return
        last = await stream.last(name.request_id)
        if last.finish_reason == common_pb2.FINISH_REASON_LENGTH and answer:
            answer += stream.tokens(name.request_id)
            assert answer == expected_tokens(prefill.engine, tokens, GREEDY, n=max_tokens)
            self.finished += 1

    async def _start(self, stream: RouterStream, tokens: list[int], shared: dict, ticket: bytes) -> bool:  # type: ignore[type-arg]
        node = self.prefills[0]
        request = start_request(
            node, tokens, **shared, ticket=ticket, store_generated=self.rng.random() < 0.5
        )
        await stream.write(request)
        return True


@pytest.mark.parametrize("seed", range(3))
async def test_many_requests_that_end_at_random_points(seed: int) -> None:
    rng = random.Random(seed)
    guess = FakeHead(guess=lambda token: (token * 7 + 3) % 1000)
    engine = {"next_token": script, "n_pages": 160, "max_waiting": 64, "step_tokens": 96}
    # The engine is slow enough for ends in every phase.
    paced = {**engine, "pace_s_per_token": 2e-5, "sleep": time.sleep}
    async with running_kvstore() as kvstore, running_drafter(guess) as drafter, running_nodes() as nodes:

        async def find() -> str:
            return drafter.host.endpoint

        prefills = [await nodes.prefill(f"prefill-{i}", **paced) for i in range(2)]
        decodes = [
            await nodes.decode(f"decode-{i}", RemoteSpeculation(find, DraftLimits()), **paced)
            for i in range(2)
        ]
        streams = [RouterStream(decodes[i % 2]) for i in range(3)]
        storm = Storm(rng, prefills, streams, kvstore)
        await asyncio.gather(*(storm.request(i) for i in range(N_REQUESTS)))
        assert storm.finished >= N_REQUESTS // 10
        for node in (*prefills, *decodes):
            await node.wait_idle()
        await kvstore.wait_idle()
        for stream in streams:
            await stream.close()

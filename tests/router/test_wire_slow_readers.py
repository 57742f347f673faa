"""A client that reads slower than its tokens come gets everything, in fewer messages; nobody else waits."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from libs.common.bounds import MAX_WAITING_BYTES
from services.router.model_card import ModelCard
from slipstream.async_client import AsyncClient
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import eventually, open_router, script
from tests.router.fake_cluster import FakeCluster

TOKENS = 1500


async def test_a_slow_reader_gets_joined_deltas_and_the_whole_text(
    cluster: FakeCluster, card: ModelCard
) -> None:
    letters = [card.tokenizer.encode_text(letter)[0] for letter in "abcdefgh"]
    answer = [letters[index % 8] for index in range(TOKENS)]
    script(cluster.model, [*answer, card.stop_token_ids[0]])
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
    async with (
        open_router(cluster, card) as router,
        grpc.aio.insecure_channel(router.host.endpoint, options=window) as channel,
        AsyncClient(router.host.endpoint) as other,
    ):
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        # Log probabilities make the answer longer than every buffer on the way.
        request = router_pb2.GenerateRequest(prompt="x", sampling=router_pb2.Sampling(top_logprobs=20))
        call = stub.Generate(request, timeout=100)
        await eventually(lambda: any(run.pipe.completion_tokens for run in router.runs.running), timeout_s=60)
        (run,) = router.runs.running
        # Nobody reads: the request stands still, bounded, and others are served meanwhile.
        assert (await other.complete("y", max_tokens=5)).finish_reason == "length"
        await eventually(lambda: run.pipe.waiting_bytes >= MAX_WAITING_BYTES, timeout_s=60)
        texts, logprobs, most = [], 0, 0
        async with asyncio.timeout(100):
            async for event in call:
                texts.append(event.delta.text)
                logprobs += len(event.delta.logprobs)
                most = max(most, run.pipe.waiting_bytes)
                await asyncio.sleep(0)
        assert "".join(texts) == "".join("abcdefgh"[index % 8] for index in range(TOKENS))
        assert logprobs == TOKENS
        assert len(texts) < TOKENS
        # One joined batch may stand above the bound, never a second one.
        assert most < 3 * MAX_WAITING_BYTES
        await eventually(lambda: not router.runs.held and not cluster.held, timeout_s=60)

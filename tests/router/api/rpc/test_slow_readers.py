"""A client that reads slower than its tokens come gets everything, in fewer messages; no other one waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from libs.common.service_bounds import MAX_WAITING_BYTES
from services.router.execution.running_request import RunningRequest
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import eventually, open_router, script
from tests.router.support.fake_cluster import FakeCluster
from tests.support.logged_errors import logged_errors

TOKENS = 1500


@asynccontextmanager
async def unread(
    router: RouterServer, cluster: FakeCluster, card: ModelCard
) -> AsyncIterator[tuple[Any, RunningRequest]]:
    """An unread answer, longer than every buffer on the way, and its request, which has begun."""
    letters = [card.tokenizer.encode_text(letter)[0] for letter in "abcdefgh"]
    answer = [letters[index % 8] for index in range(TOKENS)]
    script(cluster.model, [*answer, card.stop_token_ids[0]])
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
    async with grpc.aio.insecure_channel(router.host.endpoint, options=window) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        # Log probabilities make the answer so long.
        request = router_pb2.GenerateRequest(prompt="x", sampling=router_pb2.Sampling(top_logprobs=20))
        call = stub.Generate(request, timeout=100)
        await eventually(
            lambda: any(run.sink.completion_tokens for run in router.manager.running), timeout_s=60
        )
        (run,) = router.manager.running
        yield call, run


async def test_a_slow_reader_gets_joined_deltas_and_the_whole_text(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with (
        open_router(cluster, card) as router,
        unread(router, cluster, card) as (call, run),
        AsyncClient(router.host.endpoint) as other,
    ):
        # The client reads nothing: its request stands still, bounded, and others are served meanwhile.
        assert (await other.complete("y", max_tokens=5)).finish_reason == "length"
        await eventually(lambda: run.sink.waiting_bytes >= MAX_WAITING_BYTES, timeout_s=60)
        events, sizes, most = [], [], 0
        async with asyncio.timeout(100):
            async for message in call:
                events += message.events
                sizes.append(message.ByteSize())
                most = max(most, run.sink.waiting_bytes)
                await asyncio.sleep(0)
        texts = [event.delta.text for event in events]
        assert "".join(texts) == "".join("abcdefgh"[index % 8] for index in range(TOKENS))
        assert sum(len(event.delta.logprobs) for event in events) == TOKENS + 1  # the end token's too
        assert len(texts) < TOKENS
        assert events[-1].finished.usage.completion_tokens >= TOKENS
        # One joined batch may stand above the bound, never a second one; nor is any message longer.
        assert most < 3 * MAX_WAITING_BYTES
        assert max(sizes) < 3 * MAX_WAITING_BYTES
        await eventually(lambda: not router.manager.held and not cluster.held, timeout_s=60)


async def test_a_client_that_leaves_while_it_is_written_to_is_no_failure(
    cluster: FakeCluster, card: ModelCard, caplog: pytest.LogCaptureFixture
) -> None:
    async def leave(router: RouterServer) -> None:
        async with unread(router, cluster, card) as (call, run):
            await eventually(lambda: run.sink.waiting_bytes >= MAX_WAITING_BYTES, timeout_s=60)
            call.cancel()
            await eventually(lambda: not router.manager.held and not cluster.held, timeout_s=60)

    async with open_router(cluster, card) as router:
        for _ in range(3):
            await leave(router)
        assert router.counters.snapshot()["slipstream_requests_aborted_total"] == 3
    assert not logged_errors(caplog)

"""Calls that count tokens and run no model: limited as requests are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from libs.database.database import Database
from services.router.request.model_card import ModelCard
from slipstream.metering.rate_limits import RateLimits
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import chat_of, open_router
from tests.router.metering.test_metered_router import HELLO, PRICES, keys
from tests.router.support.fake_cluster import FakeCluster

_BODIES = {
    "/tokenize": {"messages": HELLO},
    "/detokenize": {"tokens": [1, 2]},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": HELLO},
    "/v1/responses/input_tokens": {"model": "tiny", "input": "Where?"},
}


@pytest.mark.parametrize("limits", [{"requests_per_minute": 6}, {"concurrent_requests": 1}])
async def test_calls_that_count_tokens_are_limited_as_requests(
    cluster: FakeCluster, card: ModelCard, limits: dict[str, int]
) -> None:
    """Six calls, one after the other, leave no request of the minute and take one place at a time."""
    tenants = keys(laptop=RateLimits(**limits))
    headers, metadata = {"x-api-key": "laptop"}, (("x-api-key", "laptop"),)
    async with (
        open_router(cluster, card, keys=tenants) as router,
        aiohttp.ClientSession(f"http://{router.http_endpoint}", headers=headers) as session,
        grpc.aio.insecure_channel(router.host.endpoint) as channel,
    ):
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        message = router_pb2.TokenizeRequest(request=router_pb2.GenerateRequest(chat=chat_of(HELLO)))

        async def statuses() -> list[object]:
            found: list[object] = []
            for path, body in _BODIES.items():
                async with session.post(path, json=body) as response:
                    found.append(response.status)
            for method, request in (
                (stub.Tokenize, message),
                (stub.Detokenize, router_pb2.DetokenizeRequest(token_ids=[1])),
            ):
                try:
                    await method(request, metadata=metadata)
                    found.append(grpc.StatusCode.OK)
                except grpc.aio.AioRpcError as error:
                    found.append(error.code())
            return found

        assert await statuses() == [200] * 4 + [grpc.StatusCode.OK] * 2
        if "concurrent_requests" not in limits:
            assert await statuses() == [429] * 4 + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
            return
        for worker in cluster.decodes:
            worker.gate.clear()
        body = {"model": "tiny", "messages": HELLO, "stream": True}
        async with session.post("/v1/chat/completions", json=body) as held:
            await held.content.readany()
            assert await statuses() == [429] * 4 + [grpc.StatusCode.RESOURCE_EXHAUSTED] * 2
        for worker in cluster.decodes:
            worker.gate.set()


async def test_calls_that_count_tokens_take_no_spend_and_no_tokens(
    cluster: FakeCluster, card: ModelCard, database: Database, tmp_path: Path
) -> None:
    """So they go on where a key may generate nothing more."""
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    tenants = keys(laptop=RateLimits(spend_per_month=1), phone=RateLimits(tokens_per_minute=1_000))
    async with open_router(cluster, card, keys=tenants, prices=prices, database=database) as router:
        for key, code in (("laptop", "insufficient_quota"), ("phone", "rate_limit_exceeded")):
            limited = f"http://{router.http_endpoint}"
            async with aiohttp.ClientSession(limited, headers={"x-api-key": key}) as session:
                body = {"model": "tiny", "messages": HELLO, "max_tokens": 400, "ignore_eos": True}
                for _ in range(10):
                    async with session.post("/v1/chat/completions", json=body) as answer:
                        said = await answer.json()
                    if answer.status != 200:
                        break
                assert (answer.status, said["error"]["code"]) == (429, code)
                for path, counted in _BODIES.items():
                    async with session.post(path, json=counted) as answer:
                        assert answer.status == 200, (path, await answer.text())

"""What answers of each HTTP API say that they cost, and what answers without a token cost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from libs.database.database import Database
from services.router.api.workers_ai.endpoint import RUN_PATH
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from slipstream.metering.rate_limits import RateLimits
from slipstream.v1 import responses_pb2
from slipstream.v1.responses_pb2_grpc import ResponseServiceStub
from tests.router.conftest import WAIT_S, open_router, script, text_ids
from tests.router.metering.test_metered_router import (  # noqa: F401 - fixtures
    HELLO,
    database,
    keys,
    prices,
    stopped_clock,
    usage,
)
from tests.router.support.answer_events import sse_objects
from tests.router.support.fake_cluster import FakeCluster

KEY = {"x-api-key": "laptop"}


@pytest.fixture
async def router(
    cluster: FakeCluster,
    card: ModelCard,
    prices: Path,  # noqa: F811
    database: Database,  # noqa: F811
    stopped_clock: None,  # noqa: F811
) -> AsyncIterator[RouterServer]:
    script(cluster.model, text_ids(card, "It is on its way."))
    tenants = keys(laptop=RateLimits(tokens_per_minute=100_000))
    async with open_router(cluster, card, keys=tenants, prices=prices, database=database) as opened:
        yield opened


@pytest.fixture
async def http(router: RouterServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}", headers=KEY) as session:
        yield session


async def ask(http: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with http.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


async def stream(http: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with http.post(path, json={**body, "stream": True}) as answer:
        return sse_objects(await answer.read())


def cost_of(uncached: int, cached: int, completion: int) -> float:
    return (uncached * 600_000 + cached * 100_000 + completion * 3_000_000) / 1e12


def cost_of_response(said: Any) -> float:
    cached = said["input_tokens_details"]["cached_tokens"]
    return cost_of(said["input_tokens"] - cached, cached, said["output_tokens"])


def cost_of_message(said: Any) -> float:
    return cost_of(said["input_tokens"], said["cache_read_input_tokens"], said["output_tokens"])


async def test_responses_state_the_cost_whole_streamed_and_stored(
    router: RouterServer, http: aiohttp.ClientSession
) -> None:
    whole = await ask(http, "/v1/responses", input="Where?")
    said = whole["usage"]
    assert (said["cost"], said["currency"]) == (cost_of_response(said), "USD")
    assert said["cost"] > 0
    events = await stream(http, "/v1/responses", input="Where?")
    streamed = events[-1]["response"]["usage"]
    assert streamed["cost"] == cost_of_response(streamed)
    async with http.get(f"/v1/responses/{whole['id']}") as answer:
        assert (await answer.json())["usage"] == said
    async with grpc.aio.insecure_channel(router.host.endpoint) as channel:
        service: Any = ResponseServiceStub(channel)
        request = responses_pb2.GetResponseRequest(response_id=whole["id"])
        found = await service.GetResponse(request, metadata=tuple(KEY.items()))
    cost = found.response.usage.cost
    assert (cost.amount_pico, cost.currency) == (round(said["cost"] * 10**12), "USD")


async def test_messages_state_the_cost_at_their_end(http: aiohttp.ClientSession) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 20}
    said = (await ask(http, "/v1/messages", **body))["usage"]
    assert (said["cost"], said["currency"]) == (cost_of_message(said), "USD")
    assert said["cost"] > 0
    events = await stream(http, "/v1/messages", **body)
    (start,) = [event for event in events if event["type"] == "message_start"]
    assert "cost" not in start["message"]["usage"]
    (end,) = [event for event in events if event["type"] == "message_delta"]
    assert end["usage"]["cost"] == cost_of_message(end["usage"])


async def test_runs_of_one_call_state_their_cost_and_its_sum(
    http: aiohttp.ClientSession, card: ModelCard
) -> None:
    path = RUN_PATH.format(account="acc", model=card.name)
    requests: Any = [{"prompt": "a"}, {"messages": HELLO}]
    queued = (await ask(http, f"{path}?queueRequest=true", requests=requests))["result"]
    for result in (
        (await ask(http, path, requests=requests))["result"],
        await _polled(http, path, queued["request_id"]),
    ):
        costs = [item["result"]["usage"]["cost"] for item in result["responses"]]
        assert len(costs) == 2 and min(costs) > 0
        assert result["usage"]["cost"] == round(sum(costs), 12)
        assert result["usage"]["currency"] == "USD"


async def _polled(http: aiohttp.ClientSession, path: str, request_id: str) -> Any:
    async with asyncio.timeout(WAIT_S):
        while True:
            result = (await ask(http, path, request_id=request_id))["result"]
            if "responses" in result:
                return result
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_token_that_no_answer_has_is_neither_charged_nor_counted(
    router: RouterServer, http: aiohttp.ClientSession, echo: bool, n: int, is_streamed: bool
) -> None:
    body = {"prompt": "Where?", "max_tokens": 0, "echo": echo, "n": n}
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with http.post("/v1/completions", json=body) as answer:
        assert answer.status == 200
        if is_streamed:
            lines = (await answer.text()).removesuffix("data: [DONE]\n\n")
            events = [part.removeprefix("data: ") for part in lines.removesuffix("\n\n").split("\n\n")]
            chunks = [json.loads(event) for event in events]
        else:
            chunks = [await answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == "Where?" * (n if echo else 0)
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] == ["length"] * n
    said = chunks[-1]["usage"]
    prompt_tokens = said["prompt_tokens"]
    assert (said["completion_tokens"], said["total_tokens"]) == (0, prompt_tokens)
    assert said["cost"] == cost_of(prompt_tokens, 0, 0) > 0
    await _check_counted(router, http, prompt_tokens, said["cost"])


@pytest.mark.parametrize("echo", [False, True])
async def test_nor_over_grpc(router: RouterServer, http: aiohttp.ClientSession, echo: bool) -> None:
    async with AsyncClient(router.host.endpoint, api_key="laptop") as client:
        reply = await client.complete("Where?", max_tokens=0, echo=echo)
    assert (reply.text, reply.finish_reason) == ("Where?" if echo else "", "length")
    assert reply.usage is not None and reply.usage.completion_tokens == 0
    prompt_tokens = reply.usage.prompt_tokens
    assert float(reply.usage.cost or 0) == cost_of(prompt_tokens, 0, 0) > 0
    await _check_counted(router, http, prompt_tokens, cost_of(prompt_tokens, 0, 0))


async def _check_counted(
    router: RouterServer, http: aiohttp.ClientSession, prompt_tokens: int, cost: float
) -> None:
    """The tenant's usage, its limit of tokens, and the router's metrics have the prompt alone."""
    (row,) = (await usage(router, "laptop"))["data"]
    assert (row["requests"], row["prompt_tokens"], row["completion_tokens"]) == (1, prompt_tokens, 0)
    assert float(row["cost"]) == cost
    async with http.post("/tokenize", json={"prompt": "a"}) as answer:
        left = int(answer.headers["x-ratelimit-remaining-tokens"])
    assert left == 100_000 - prompt_tokens
    metrics = router.metrics.snapshot()
    assert router.counters.total("slipstream_completion_tokens_total") == 0
    assert metrics['slipstream_cost_total{model="tiny",currency="USD"}'] == cost

"""A router with prices, limits and a database: what clients of both APIs see, and what is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import openai
import pytest
from typer.testing import CliRunner

from libs.database.database import Database, open_database
from services.router import pipeline
from services.router.api.api_keys import ApiKeys
from services.router.metering import usage_ledger
from services.router.metering.assembly import make_metering
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from slipstream.cli.app import app
from slipstream.credentials.api_key_file import KeyRecord, KeyScope, key_hash
from slipstream.errors import InvalidArgument, QuotaExceeded, RateLimited
from slipstream.metering.rate_limits import NO_LIMITS, RateLimits
from slipstream.replies import ModelPricing
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import jobs_pb2, router_pb2, router_pb2_grpc
from slipstream.v1.jobs_pb2_grpc import JobServiceStub
from tests.router.conftest import WAIT_S, chat_of, eventually, open_router, script, text_ids
from tests.router.support.fake_cluster import FakeCluster

HELLO: Any = [{"role": "user", "content": "Where is my order?"}]
PRICES = 'currency = "USD"\n[[model]]\nname = "tiny"\ninput = 0.60\ncached_input = 0.10\noutput = 3.00\n'


def keys(tenant: RateLimits = NO_LIMITS, **limits: RateLimits) -> ApiKeys:
    """Keys of the tenant anna by name, and an operator's key `root`."""
    found = ApiKeys()
    records = [
        KeyRecord(name, "anna", KeyScope.TENANT, key_hash(name), limits=given)
        for name, given in limits.items()
    ]
    root = KeyRecord("root", "ops", KeyScope.OPERATOR, key_hash("root"))
    found.replace([*records, root], {"anna": tenant} if tenant != NO_LIMITS else {})
    return found


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits a minute count by minutes of the calendar: a test that is in two of them sees two windows."""
    now_unix_s = time.time() // 60 * 60 + 30
    monkeypatch.setattr(pipeline, "make_metering", partial(make_metering, wall_clock_s=lambda: now_unix_s))


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    path = tmp_path / "prices.toml"
    path.write_text(PRICES)
    return path


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = open_database(f"sqlite:{tmp_path / 'usage.db'}")
    yield opened
    await opened.close()


Api = Callable[[RouterServer, str], Any]


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    """OpenAI's client of a router by a key."""
    async with contextlib.AsyncExitStack() as stack:

        def client(router: RouterServer, key: str) -> Any:
            made = openai.AsyncOpenAI(
                base_url=f"http://{router.http_endpoint}/v1", api_key=key, max_retries=0
            )
            stack.push_async_callback(made.close)
            return made

        yield client


async def usage(router: RouterServer, key: str, query: str = "") -> Any:
    headers = {"authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(f"http://{router.http_endpoint}", headers=headers) as session,
        session.get(f"/v1/usage{query}") as response,
    ):
        return await response.json()


async def generate(router: RouterServer, key: str, **fields: Any) -> list[router_pb2.GenerateEvent]:
    request = router_pb2.GenerateRequest(chat=chat_of(HELLO), **fields)
    metadata = (("x-api-key", key),)
    async with grpc.aio.insecure_channel(router.host.endpoint) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        return [event async for part in stub.Generate(request, metadata=metadata) for event in part.events]


def expected_cost(usage: Any) -> Any:
    cached = usage.prompt_tokens_details.cached_tokens
    return round(
        ((usage.prompt_tokens - cached) * 0.6 + cached * 0.1 + usage.completion_tokens * 3.0) / 1e6, 12
    )


async def test_answers_streams_and_models_state_the_cost(
    cluster: FakeCluster, card: ModelCard, prices: Path, api: Api
) -> None:
    script(cluster.model, text_ids(card, "It is on its way."))
    tenants = keys(laptop=NO_LIMITS)
    async with open_router(cluster, card, keys=tenants, prices=prices) as router:
        client = api(router, "laptop")
        whole = await client.chat.completions.create(model="tiny", messages=HELLO)
        assert whole.usage.completion_tokens > 0
        assert (whole.usage.cost, whole.usage.currency) == (expected_cost(whole.usage), "USD")
        stream = await client.chat.completions.create(
            model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        last = [chunk async for chunk in stream][-1]
        assert last.usage.cost == expected_cost(last.usage)
        (model,) = (await client.models.list()).data
        assert model.pricing == {
            "currency": "USD",
            "prompt": "0.0000006",
            "input_cache_read": "0.0000001",
            "completion": "0.000003",
        }
        async with AsyncClient(router.host.endpoint, api_key="laptop") as sdk:
            (same,) = await sdk.list_models()
        assert same.pricing == ModelPricing("USD", Decimal("6e-7"), Decimal("1e-7"), Decimal("3e-6"))
        assert same.max_context_tokens == model.max_context_tokens
        events = await generate(router, "laptop")
        counted = events[-1].finished.usage
        uncached = counted.prompt_tokens - counted.cached_tokens
        assert counted.cost.currency == "USD"
        assert counted.cost.amount_pico == (
            uncached * 600_000 + counted.cached_tokens * 100_000 + counted.completion_tokens * 3_000_000
        )


async def test_of_several_choices_the_first_pays_the_prompt(
    cluster: FakeCluster, card: ModelCard, prices: Path, database: Database, api: Api
) -> None:
    script(cluster.model, text_ids(card, "It is on its way."))
    options = {"keys": keys(laptop=NO_LIMITS), "prices": prices, "database": database}
    async with open_router(cluster, card, **options) as router:
        client = api(router, "laptop")
        reply = await client.chat.completions.create(model="tiny", messages=HELLO, n=3)
        assert len(reply.choices) == 3
        assert reply.usage.cost == expected_cost(reply.usage)
        (row,) = (await usage(router, "laptop"))["data"]
        assert row["requests"] == 1
        assert float(row["cost"]) == reply.usage.cost
        assert row["prompt_tokens"] == reply.usage.prompt_tokens
        assert row["completion_tokens"] == reply.usage.completion_tokens


async def test_usage_is_of_the_own_tenant_and_survives_a_restart(
    cluster: FakeCluster,
    card: ModelCard,
    prices: Path,
    database: Database,
    api: Api,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(usage_ledger, "USAGE_WRITE_S", WAIT_S)  # the end of the router writes
    script(cluster.model, text_ids(card, "It is on its way."))
    tenants = keys(laptop=NO_LIMITS, phone=NO_LIMITS)
    options = {"keys": tenants, "prices": prices, "database": database}
    async with open_router(cluster, card, **options) as router:
        for key in ("laptop", "laptop", "phone"):
            await api(router, key).chat.completions.create(model="tiny", messages=HELLO)
        await generate(router, "root")
    async with open_router(cluster, card, **options) as router:
        before = await usage(router, "root", "?group_by=tenant,key,endpoint")
        rows = [(row["tenant"], row["key"], row["endpoint"], row["requests"]) for row in before["data"]]
        path = "/v1/chat/completions"
        assert rows == [
            ("anna", "laptop", path, 2),
            ("anna", "phone", path, 1),
            ("ops", "root", "Generate", 1),
        ]
        (own,) = (await usage(router, "phone"))["data"]
        assert own["requests"] == 3
        refused = await usage(router, "phone", "?tenant=ops")
        assert refused["error"]["type"] == "permission_error"
        (theirs,) = (await usage(router, "root", "?tenant=anna"))["data"]
        assert theirs == own
        assert (await usage(router, "root", "?to=2020-01-01"))["data"] == []
        assert (await usage(router, "root", "?group_by=hour"))["error"]["param"] == "group_by"
        async with grpc.aio.insecure_channel(router.host.endpoint) as channel:
            stub: Any = router_pb2_grpc.RouterServiceStub(channel)
            request = router_pb2.GetUsageRequest(group_by=[router_pb2.USAGE_GROUP_KEY])
            response = await stub.GetUsage(request, metadata=(("x-api-key", "laptop"),))
        assert [(row.key, row.requests) for row in response.rows] == [("laptop", 2), ("phone", 1)]
        assert response.rows[0].cost == before["data"][0]["cost"]


async def test_the_sdk_and_the_command_line_show_usage(
    cluster: FakeCluster, card: ModelCard, prices: Path, database: Database, api: Api
) -> None:
    script(cluster.model, text_ids(card, "It is on its way."))
    options = {"keys": keys(laptop=NO_LIMITS), "prices": prices, "database": database}
    async with open_router(cluster, card, **options) as router:
        await api(router, "laptop").chat.completions.create(model="tiny", messages=HELLO)
        async with AsyncClient(router.host.endpoint, api_key="laptop") as client:
            (row,) = await client.usage(group_by=["key"])
        assert (row.key, row.day, row.requests, row.currency) == ("laptop", "", 1, "USD")
        assert row.cost > 0
        arguments = ["usage", "--endpoint", router.host.endpoint, "--by", "key,model"]
        run = partial(CliRunner().invoke, app, env={"SLIPSTREAM_API_KEY": "laptop"})
        shown = await asyncio.to_thread(run, arguments)
        assert shown.exit_code == 0, shown.output
        assert f"{row.cost:f}" in shown.output and "laptop" in shown.output and "tiny" in shown.output
        (listed,) = json.loads((await asyncio.to_thread(run, [*arguments, "--json"])).output)
        assert (listed["key"], listed["cost"]) == ("laptop", str(row.cost))
        wrong = await asyncio.to_thread(run, [*arguments[:-1], "hour"])
        assert isinstance(wrong.exception, InvalidArgument) and wrong.exception.field == "group_by"


async def test_a_client_that_leaves_is_charged_for_what_it_got(
    cluster: FakeCluster, card: ModelCard, prices: Path, database: Database, api: Api
) -> None:
    for worker in cluster.decodes:
        worker.gate.clear()
    options = {"keys": keys(laptop=NO_LIMITS), "prices": prices, "database": database}
    async with open_router(cluster, card, **options) as router:
        stream = await api(router, "laptop").chat.completions.create(
            model="tiny", messages=HELLO, stream=True
        )
        await anext(aiter(stream))
        await eventually(lambda: any(run.sink.completion_tokens for run in router.manager.running))
        await stream.close()
        await eventually(lambda: not router.manager.held)
        (row,) = (await usage(router, "laptop"))["data"]
        assert row["prompt_tokens"] > 0 and row["completion_tokens"] > 0 and float(row["cost"]) > 0


@pytest.mark.usefixtures("stopped_clock")
async def test_a_limit_of_requests_is_stated_in_headers_and_refused_by_code(
    cluster: FakeCluster, card: ModelCard, api: Api
) -> None:
    tenants = keys(laptop=RateLimits(requests_per_minute=2, tokens_per_minute=100_000), phone=NO_LIMITS)
    async with open_router(cluster, card, keys=tenants) as router:
        create = api(router, "laptop").chat.completions.with_raw_response.create
        first = await create(model="tiny", messages=HELLO)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"].endswith("s")
        assert first.headers["x-ratelimit-limit-tokens"] == "100000"
        # The first answer's estimate is replaced by its tokens when it ends.
        second = await create(model="tiny", messages=HELLO, stream=True)
        assert second.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as refused:
            await create(model="tiny", messages=HELLO)
        assert refused.value.code == "rate_limit_exceeded"
        assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
        with pytest.raises(openai.RateLimitError) as of_anthropic:
            await create(model="tiny", messages=HELLO, extra_headers={"anthropic-version": "2023-06-01"})
        headers = of_anthropic.value.response.headers
        assert headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert "x-ratelimit-remaining-requests" not in headers
        assert "2 requests a minute for key laptop" in refused.value.message
        with pytest.raises(grpc.aio.AioRpcError) as over_grpc:
            await generate(router, "laptop")
        typed = from_rpc_error(over_grpc.value)
        assert over_grpc.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert isinstance(typed, RateLimited) and 0 < typed.retry_after_ms <= 60_000
        other = await api(router, "phone").chat.completions.with_raw_response.create(
            model="tiny", messages=HELLO
        )
        assert not [name for name in other.headers if name.startswith("x-ratelimit")]
        assert router.metrics.snapshot()['slipstream_limited_total{limit="requests_per_minute"}'] == 3


async def test_concurrent_requests_of_a_tenant_are_limited_and_end(
    cluster: FakeCluster, card: ModelCard, api: Api
) -> None:
    for worker in cluster.decodes:
        worker.gate.clear()
    tenants = keys(RateLimits(concurrent_requests=1), laptop=NO_LIMITS, phone=NO_LIMITS)
    async with open_router(cluster, card, keys=tenants) as router:
        stream = await api(router, "laptop").chat.completions.create(
            model="tiny", messages=HELLO, stream=True
        )
        with pytest.raises(openai.RateLimitError, match="1 requests at a time for tenant anna"):
            await api(router, "phone").chat.completions.create(model="tiny", messages=HELLO)
        await stream.close()
        for worker in cluster.decodes:
            worker.gate.set()
        await eventually(lambda: not router.manager.held)
        await api(router, "phone").chat.completions.create(model="tiny", messages=HELLO)


async def test_spend_is_limited_over_restarts(
    cluster: FakeCluster, card: ModelCard, prices: Path, database: Database, api: Api
) -> None:
    tenants = keys(RateLimits(spend_per_month=1), laptop=NO_LIMITS)
    options = {"keys": tenants, "prices": prices, "database": database}
    async with open_router(cluster, card, **options) as router:
        await api(router, "laptop").chat.completions.create(model="tiny", messages=HELLO)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await generate(router, "laptop")
        assert isinstance(from_rpc_error(refused.value), QuotaExceeded)
    async with open_router(cluster, card, **options) as router:
        limited: list[openai.RateLimitError] = []

        async def is_limited() -> bool:
            try:
                await api(router, "laptop").chat.completions.create(model="tiny", messages=HELLO)
            except openai.RateLimitError as error:
                limited.append(error)
            return bool(limited)

        # The first requests after a restart may come before the database has answered.
        for _ in range(100):
            if await is_limited():
                break
        assert limited and limited[0].code == "insufficient_quota"


async def test_two_routers_add_to_the_same_rows(
    cluster: FakeCluster, card: ModelCard, database: Database, api: Api
) -> None:
    options = {"keys": keys(laptop=NO_LIMITS), "database": database}
    async with (
        open_router(cluster, card, instance="router-0", **options) as one,
        open_router(cluster, card, instance="router-1", **options) as other,
    ):
        for router in (one, other, other):
            await api(router, "laptop").chat.completions.create(model="tiny", messages=HELLO)

        async def counted() -> int:
            rows = (await usage(one, "laptop"))["data"]
            return sum(row["requests"] for row in rows)

        async with asyncio.timeout(WAIT_S):  # the other writes once a second
            while (n_requests := await counted()) < 3:
                await asyncio.sleep(0.05)
        (row,) = (await usage(one, "laptop"))["data"]
        assert (n_requests, row["currency"], row["cost"]) == (3, "", "0")


async def test_a_router_without_a_price_of_its_model_does_not_start(
    cluster: FakeCluster, card: ModelCard, prices: Path
) -> None:
    await asyncio.to_thread(prices.write_text, PRICES.replace("tiny", "other"))
    with pytest.raises(ValueError, match=r"prices\.toml: has no price of the model tiny"):
        open_router(cluster, card, prices=prices)


async def test_without_a_database_usage_names_the_flag(router: RouterServer) -> None:
    body = await usage(router, "any")
    assert "--database" in body["error"]["message"]


@pytest.mark.usefixtures("stopped_clock")
async def test_limits_of_a_key_hold_its_jobs_and_its_usage_has_them(
    cluster: FakeCluster, card: ModelCard, database: Database, api: Api
) -> None:
    tenants = keys(laptop=RateLimits(requests_per_minute=1), phone=NO_LIMITS)
    body = json.dumps({"messages": HELLO, "max_tokens": 3}).encode()
    submit = jobs_pb2.SubmitJobsRequest(jobs=[jobs_pb2.NewJob(path="/v1/chat/completions", body=body)])
    async with (
        open_router(cluster, card, keys=tenants, database=database) as router,
        dial(router.host.endpoint) as channel,
    ):
        stub: Any = JobServiceStub(channel)
        await api(router, "laptop").chat.completions.create(model="tiny", messages=HELLO)
        await stub.SubmitJobs(submit, metadata=[("authorization", "Bearer laptop")])
        limited = 'slipstream_limited_total{limit="requests_per_minute"}'
        await eventually(lambda: router.metrics.snapshot().get(limited, 0) >= 1)
        await stub.SubmitJobs(submit, metadata=[("authorization", "Bearer phone")])

        async def keys_with_usage() -> set[str]:
            return {row["key"] for row in (await usage(router, "phone", "?group_by=key"))["data"]}

        async with asyncio.timeout(WAIT_S):
            while await keys_with_usage() != {"laptop", "phone"}:
                await asyncio.sleep(0.05)

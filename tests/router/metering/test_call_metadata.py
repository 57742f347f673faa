"""What calls over gRPC state in their metadata: the limits of their key, and what they cost."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.router.api.choices import ChoiceEvents, ChoiceRuns
from services.router.execution.running_request import RunningRequest
from services.router.request.model_card import ModelCard
from slipstream.errors import InvalidArgument, RateLimited, SlipstreamError, Unavailable
from slipstream.metering.rate_limits import RateLimits
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import chat_of, open_router, script, text_ids
from tests.router.metering.test_metered_router import HELLO, keys, prices, stopped_clock  # noqa: F401 - fixtures
from tests.router.support.fake_cluster import FakeCluster


async def test_calls_state_limits_and_costs_in_their_metadata(
    cluster: FakeCluster,
    card: ModelCard,
    prices: Path,  # noqa: F811
    stopped_clock: None,  # noqa: F811
) -> None:
    script(cluster.model, text_ids(card, "It is on its way."))
    limits = RateLimits(requests_per_minute=4, tokens_per_minute=100_000)
    key = (("x-api-key", "laptop"),)
    async with (
        open_router(cluster, card, keys=keys(laptop=limits), prices=prices) as router,
        grpc.aio.insecure_channel(router.host.endpoint) as channel,
    ):
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        costs = []
        for number, n in enumerate((1, 2)):
            call = stub.Generate(router_pb2.GenerateRequest(chat=chat_of(HELLO), n=n), metadata=key)
            first = {name: value for name, value in await call.initial_metadata()}
            events = [event async for part in call for event in part.events]
            ends = [event.finished.usage for event in events if event.HasField("finished")]
            last = {name: value for name, value in await call.trailing_metadata()}
            for found in (first, last):
                assert found["x-ratelimit-limit-requests"] == "4"
                assert found["x-ratelimit-remaining-requests"] == str(3 - number)
                assert found["x-ratelimit-limit-tokens"] == "100000"
            assert "x-slipstream-cost" not in first
            assert (len(ends), last["x-slipstream-currency"]) == (n, "USD")
            amount = sum(usage.cost.amount_pico for usage in ends)
            assert int(Decimal(last["x-slipstream-cost"]) * 10**12) == amount > 0
            costs.append(amount)
        asked = router_pb2.TokenizeRequest(request=router_pb2.GenerateRequest(prompt="a"))
        tokenize = stub.Tokenize(asked, metadata=key)
        await tokenize
        assert dict(await tokenize.trailing_metadata())["x-ratelimit-remaining-requests"] == "1"
        await stub.Tokenize(asked, metadata=key)
        refused = stub.Generate(router_pb2.GenerateRequest(chat=chat_of(HELLO)), metadata=key)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await refused.read()
        assert isinstance(from_rpc_error(error.value), RateLimited)
        said = dict(error.value.trailing_metadata())
        assert said["x-ratelimit-remaining-requests"] == "0"
        assert "x-request-id" in said


def _refused(**fields: Any) -> bytes:
    return router_pb2.GenerateRequest(chat=chat_of(HELLO), **fields).SerializeToString()


async def test_a_refused_call_states_the_limits_of_its_key(cluster: FakeCluster, card: ModelCard) -> None:
    limits = RateLimits(requests_per_minute=4)
    async with (
        open_router(cluster, card, keys=keys(laptop=limits)) as router,
        grpc.aio.insecure_channel(router.host.endpoint) as channel,
    ):
        generate: Any = channel.stream_stream("/slipstream.v1.RouterService/Generate")
        for messages in (
            [],
            [b"\xff"],  # no message of this method
            [_refused(n=1, sampling=router_pb2.Sampling(temperature=-1))],
            [_refused(n=2, output=router_pb2.OutputFormat(json_schema='{"divisibleBy": 3}'))],
        ):
            call = generate(iter(messages), metadata=(("x-api-key", "laptop"),))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert isinstance(from_rpc_error(refused.value), InvalidArgument)
            said = dict(refused.value.trailing_metadata())
            assert said["x-ratelimit-limit-requests"] == "4"
            assert "x-request-id" in said


@pytest.mark.parametrize(
    "failure", [Unavailable("no worker is left"), RateLimited("too many", retry_after_ms=5)]
)
async def test_an_answer_whose_second_choice_fails_states_limits_and_what_the_first_cost(
    failure: SlipstreamError,
    cluster: FakeCluster,
    card: ModelCard,
    prices: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script(cluster.model, text_ids(card, "It is on its way."))
    is_read = asyncio.Event()
    begin, next_events = ChoiceRuns._begin, ChoiceRuns.next_events

    async def begin_or_fail(choices: ChoiceRuns, index: int) -> RunningRequest:
        if index == 1:
            await is_read.wait()
            raise failure
        return await begin(choices, index)

    async def noted_events(choices: ChoiceRuns) -> ChoiceEvents | None:
        item = await next_events(choices)
        if item is not None and item[1][-1].HasField("finished"):
            is_read.set()
        return item

    monkeypatch.setattr(ChoiceRuns, "_begin", begin_or_fail)
    monkeypatch.setattr(ChoiceRuns, "next_events", noted_events)
    async with (
        open_router(
            cluster, card, keys=keys(laptop=RateLimits(requests_per_minute=4)), prices=prices
        ) as router,
        grpc.aio.insecure_channel(router.host.endpoint) as channel,
    ):
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        request = router_pb2.GenerateRequest(chat=chat_of(HELLO), n=2, request_id="r-two")
        call = stub.Generate(request, metadata=(("x-api-key", "laptop"),))
        events: list[router_pb2.GenerateEvent] = []

        async def read() -> None:
            async for part in call:
                events.extend(part.events)

        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await read()
    assert isinstance(from_rpc_error(failed.value), type(failure))
    (usage,) = [event.finished.usage for event in events if event.HasField("finished")]
    said = dict(failed.value.trailing_metadata())
    assert said["x-request-id"] == "r-two"
    assert said["x-ratelimit-limit-requests"] == "4"
    assert int(Decimal(said["x-slipstream-cost"]) * 10**12) == usage.cost.amount_pico > 0

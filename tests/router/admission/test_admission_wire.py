"""Admission as clients meet it: waiting, refusal and its wording on both APIs, preemption."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from services.router.admission.types import BUSY_MESSAGE
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.rpc.dial import dial
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import eventually, open_router
from tests.router.support.fake_cluster import FakeCluster

HELLO: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def full_router(
    cluster: FakeCluster, card: ModelCard
) -> AsyncIterator[tuple[RouterServer, AsyncClient]]:
    """A router with one place, which request `first` holds without getting its first token."""
    for prefill in cluster.prefills:
        prefill.gate.clear()
    async with (
        open_router(cluster, card, max_requests=1) as router,
        AsyncClient(router.host.endpoint) as client,
    ):
        first = asyncio.create_task(client.chat(HELLO, request_id="first"))
        await eventually(lambda: router.manager.gate.controller.running == 1)
        await eventually(lambda: any(prefill.requests for prefill in cluster.prefills))
        try:
            yield router, client
        finally:
            for prefill in cluster.prefills:
                prefill.gate.set()
            await asyncio.gather(first, return_exceptions=True)


async def test_a_request_beyond_the_limit_waits(cluster: FakeCluster, card: ModelCard) -> None:
    async with full_router(cluster, card) as (router, client):
        second = asyncio.create_task(client.chat(HELLO))
        await eventually(lambda: router.manager.gate.controller.waiting == 1)
        assert sum(len(prefill.requests) for prefill in cluster.prefills) == 1
        for prefill in cluster.prefills:
            prefill.gate.set()
        assert (await asyncio.wait_for(second, 60)).finish_reason == "stop"
        await eventually(lambda: not router.manager.held)
        assert (router.manager.gate.controller.running, router.manager.gate.controller.waiting) == (0, 0)


async def test_the_wait_of_a_client_that_gives_up_is_observed_once(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with full_router(cluster, card) as (router, client):
        assert waits(router) == 1  # of the request that runs
        queued = [asyncio.create_task(client.chat(HELLO)) for _ in range(2)]
        await eventually(lambda: router.manager.gate.controller.waiting == 2)
        assert waits(router) == 1
        queued[0].cancel()
        await eventually(lambda: router.manager.held == 2)
        assert waits(router) == 2
        for prefill in cluster.prefills:
            prefill.gate.set()
        assert (await asyncio.wait_for(queued[1], 60)).finish_reason == "stop"
        await eventually(lambda: not router.manager.held)
        assert waits(router) == 3


def waits(router: RouterServer) -> float:
    """The waits for admission that the router observed."""
    return router.counters.snapshot()["slipstream_request_queue_seconds_count"]


async def test_a_request_that_rejects_waiting_gets_the_same_error_over_grpc_and_http(
    cluster: FakeCluster, card: ModelCard
) -> None:
    import openai  # half a second of each process that collects the tests

    async with full_router(cluster, card) as (router, _), dial(router.host.endpoint) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        request = router_pb2.GenerateRequest(prompt="x", reject_if_busy=True)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _event in stub.Generate(request, timeout=60):
                pass
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert refused.value.details() == BUSY_MESSAGE
        status = rpc_status.from_call(refused.value)
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.ToMilliseconds() > 0
        body = {"messages": HELLO}
        async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
            for more, query in (({"options": {"rejectIfBusy": True}}, ""), ({}, "?rejectIfBusy=true")):
                async with http.post(f"/v1/chat/completions{query}", json={**body, **more}) as answer:
                    assert answer.status == 429
                    assert int(answer.headers["Retry-After"]) >= 1
                    assert int(answer.headers["retry-after-ms"]) > 0
                    error = (await answer.json())["error"]
                    assert (error["message"], error["code"]) == (BUSY_MESSAGE, "3040")
                    assert error["type"] == "rate_limit_error"
        url = f"http://{router.http_endpoint}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as other:
            options = {"options": {"rejectIfBusy": True}}
            with pytest.raises(openai.RateLimitError) as busy:
                await other.chat.completions.create(model="tiny", messages=HELLO, extra_body=options)
            assert busy.value.code == "3040"
        counters = router.counters.snapshot()
        assert counters["slipstream_admission_rejected_total"] == 4
        async with (
            aiohttp.ClientSession(f"http://{router.admin_http_endpoint}") as http,
            http.get("/metrics") as metrics,
        ):
            rows = (await metrics.text()).splitlines()
        assert "slipstream_refusal_seconds_count 4.0" in rows
        assert router.manager.held == 1


async def test_answers_and_refusals_leave_no_reference_cycles(cluster: FakeCluster, card: ModelCard) -> None:
    """A garbage collection takes milliseconds and delays other requests."""

    def calls() -> int:
        return sum(type(item).__name__ in ("RPCState", "Run", "AbortError") for item in gc.get_objects())

    async with (
        full_router(cluster, card) as (router, _),
        dial(router.host.endpoint) as channel,
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
    ):
        generate: Any = channel.unary_stream("/slipstream.v1.RouterService/Generate")

        async def ask() -> None:
            request = router_pb2.GenerateRequest(prompt="x", reject_if_busy=True)
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for _ in generate(request.SerializeToString(), timeout=60):
                    pass
            body = {"prompt": "x", "options": {"rejectIfBusy": True}}
            async with http.post("/v1/completions", json=body) as answer:
                await answer.read()

        await ask()
        before = calls()
        gc.disable()
        try:
            for busy in (True, False):
                if not busy:
                    for prefill in cluster.prefills:
                        prefill.gate.set()
                    await eventually(lambda: not router.manager.held)
                for _ in range(10):
                    await ask()
                await eventually(lambda: calls() <= before + 2)
        finally:
            gc.enable()
        counters = router.counters.snapshot()
        assert counters["slipstream_admission_rejected_total"] == 22
        assert counters["slipstream_requests_finished_total"] >= 20


async def test_a_full_router_refuses_a_request_before_validating_it(
    cluster: FakeCluster, card: ModelCard
) -> None:
    """Validation of tools takes time, so the answer is "busy" and not the defect."""
    broken = {"type": "function", "function": {"name": "f", "parameters": "{"}}
    body = {"messages": HELLO, "tools": [broken], "options": {"rejectIfBusy": True}}
    async with (
        full_router(cluster, card) as (router, _),
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
    ):
        async with http.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 429
        for prefill in cluster.prefills:
            prefill.gate.set()
        await eventually(lambda: not router.manager.held)
        async with http.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 400
            assert "parameters" in (await answer.json())["error"]["param"]


async def test_a_prompt_beyond_the_context_is_an_invalid_argument_even_when_busy(
    cluster: FakeCluster, card: ModelCard
) -> None:
    too_long: Any = [{"role": "user", "content": "Where is my order? " * 2000}]
    async with full_router(cluster, card) as (router, client):
        with pytest.raises(errors.InvalidArgument, match="context"):
            await client.chat(too_long, reject_if_busy=True)
        with pytest.raises(errors.Overloaded):
            await client.chat(HELLO, reject_if_busy=True)
        assert router.manager.held == 1


async def test_a_prompt_beyond_the_context_is_not_queued(cluster: FakeCluster, card: ModelCard) -> None:
    """In the queue it could be evicted or evict other requests."""
    too_long: Any = [{"role": "user", "content": "Where is my order? " * 2000}]
    async with full_router(cluster, card) as (router, client):
        waiting = [asyncio.create_task(client.chat(HELLO)) for _ in range(2)]
        await eventually(lambda: router.manager.gate.controller.waiting == 2)
        results = await asyncio.gather(*(client.chat(too_long) for _ in range(3)), return_exceptions=True)
        assert [type(error) for error in results] == [errors.ContextExceeded] * 3
        assert all("context" in str(error) for error in results)
        assert (router.manager.gate.controller.waiting, router.manager.held) == (2, 3)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await eventually(lambda: router.manager.held == 1)


async def test_few_prompts_wait_for_measuring_and_the_others_in_the_queue(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libs.common.service_bounds.MAX_MEASURED", 2)
    too_long: Any = [{"role": "user", "content": "Where is my order? " * 2000}]
    async with full_router(cluster, card) as (router, client):
        async with router.manager.lengths.turn:  # stands for a measurement that does not end
            asked = [asyncio.create_task(client.chat(too_long)) for _ in range(5)]
            await eventually(lambda: router.manager.gate.controller.waiting == 3)
            for is_refused_first in (False, True):
                ids = [1] * (card.max_context_tokens + 1)  # their number is known
                with pytest.raises(errors.ContextExceeded):
                    await asyncio.wait_for(client.complete(ids, reject_if_busy=is_refused_first), 60)
            assert not any(task.done() for task in asked)
        # No place becomes free: what waits in the queue is measured there.
        results = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)
        assert [type(error) for error in results] == [errors.ContextExceeded] * 5
        assert all(f"context length is {card.max_context_tokens} tokens" in str(error) for error in results)
        await eventually(lambda: router.manager.held == 1)


async def test_a_prompt_within_the_context_is_measured_in_the_queue_and_runs(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libs.common.service_bounds.MAX_MEASURED", 0)
    within: Any = [{"role": "user", "content": "Where is my order? " * 100}]
    async with full_router(cluster, card) as (router, client):
        monkeypatch.setattr(router.manager.lengths, "may_exceed", lambda chars: chars > 100)
        n_before = router.manager.context.counters.snapshot()["slipstream_prompt_tokens_encoded_total"]
        asked = asyncio.create_task(client.chat(within))
        await eventually(
            lambda: (
                router.manager.context.counters.snapshot()["slipstream_prompt_tokens_encoded_total"]
                > n_before
            )
        )
        assert router.manager.gate.controller.waiting == 1
        for prefill in cluster.prefills:
            prefill.gate.set()
        assert (await asyncio.wait_for(asked, 60)).finish_reason == "stop"


async def test_an_interactive_request_preempts_one_without_output(
    cluster: FakeCluster, card: ModelCard
) -> None:
    for prefill in cluster.prefills:
        prefill.gate.clear()
    async with (
        open_router(cluster, card, max_requests=1) as router,
        AsyncClient(router.host.endpoint) as client,
    ):
        alone = asyncio.create_task(client.chat(HELLO, headers={"x-slipstream-priority": "bulk"}, seed=7))
        await eventually(lambda: sum(len(prefill.requests) for prefill in cluster.prefills) == 1)
        urgent = asyncio.create_task(
            client.chat(HELLO, headers={"x-slipstream-priority": "interactive"}, request_id="urgent")
        )
        await eventually(lambda: router.counters.snapshot().get("slipstream_admission_preempted_total") == 1)
        # Its work on the workers is aborted before the urgent request ends.
        await eventually(lambda: any(prefill.aborted for prefill in cluster.prefills))
        assert not urgent.done()
        for prefill in cluster.prefills:
            prefill.gate.set()
        assert (await asyncio.wait_for(urgent, 60)).finish_reason == "stop"
        again = await asyncio.wait_for(alone, 60)
        assert again.finish_reason == "stop"
        assert again.text == (await client.chat(HELLO, seed=7)).text
        await eventually(lambda: not router.manager.held and not cluster.held)
        assert waits(router) == 3, "the preempted request waited for one first admission"


async def test_a_cancelled_waiting_request_holds_nothing_and_deadlines_count_while_waiting(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with full_router(cluster, card) as (router, client):
        cancelled = asyncio.create_task(client.chat(HELLO))
        await eventually(lambda: router.manager.gate.controller.waiting == 1)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await eventually(lambda: router.manager.gate.controller.waiting == 0)
        with pytest.raises((errors.Overloaded, errors.DeadlineExceeded)):
            await client.chat(HELLO, timeout_s=0.3)
        await eventually(lambda: router.manager.held == 1)
        assert sum(len(prefill.requests) for prefill in cluster.prefills) == 1


async def test_an_unknown_priority_class_is_refused(cluster: FakeCluster, card: ModelCard) -> None:
    async with open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        with pytest.raises(errors.InvalidArgument, match="interactive, default, bulk"):
            await client.chat(HELLO, headers={"x-slipstream-priority": "vip"})
        async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
            for tier, status in (("flex", 200), ("priority", 200), ("auto", 200), ("vip", 400)):
                body = {"messages": HELLO, "service_tier": tier}
                async with http.post("/v1/chat/completions", json=body) as answer:
                    assert answer.status == status

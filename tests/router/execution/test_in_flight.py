"""Tokens in flight and predicted blocks, which a router counts before any worker reports."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from libs.common.cluster.worker_record import Role
from services.router.request.model_card import ModelCard
from services.router.request.types import Caller, ChatInput, GenerationRequest, Sampling
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from tests.router.conftest import eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel
from tests.router.support.fake_workers import FakeWorker

LONG = [{"role": "user", "content": "Where is my order? " * 60}]


def tokens_at(router: RouterServer, workers: Sequence[FakeWorker]) -> int:
    """Return the tokens in flight at these workers by this router's count."""
    links = [router.fleet.find(worker.role, worker.instance) for worker in workers]
    return sum(link.tokens_in_flight for link in links if link is not None)


async def test_tokens_in_flight_follow_sending_computing_and_streaming(
    cluster: FakeCluster, card: ModelCard
) -> None:
    for prefill in cluster.prefills:
        prefill.gate.clear()
        prefill.computes = 100
    for decode in cluster.decodes:
        decode.gate.clear()
    async with open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        stream = client.stream_chat(LONG, seed=1)
        events = aiter(stream)
        reading = asyncio.ensure_future(anext(events))
        await eventually(lambda: bool(cluster.prefills[0].requests or cluster.prefills[1].requests))
        await eventually(lambda: any(worker.starts for worker in cluster.decodes))
        prompt_tokens = tokens_at(router, cluster.decodes)
        assert prompt_tokens > 200
        await eventually(lambda: tokens_at(router, cluster.prefills) == prompt_tokens - 100)
        for worker in cluster.prefills:
            worker.gate.set()
        await reading
        # One token came from prefill, and a frame from decode before its gate.
        await eventually(lambda: tokens_at(router, cluster.prefills) == 0)
        await eventually(lambda: prompt_tokens < tokens_at(router, cluster.decodes) < prompt_tokens + 20)
        stream.close()
        await eventually(lambda: router.fleet.tokens_in_flight == 0 and not cluster.held)


async def test_a_sibling_is_placed_by_the_predicted_blocks_of_a_running_prompt(
    cluster: FakeCluster, card: ModelCard
) -> None:
    """No worker has reported a block: the first prompt is still computed when the second is placed."""
    for worker in cluster.prefills:
        worker.gate.clear()
        worker.computes = 1
    async with open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        asked = [asyncio.create_task(client.chat(LONG, request_id="first"))]
        await eventually(lambda: any(worker.requests for worker in cluster.prefills))
        asked.append(asyncio.create_task(client.chat(LONG, request_id="second")))
        await eventually(lambda: sum(len(worker.requests) for worker in cluster.prefills) == 2)
        decisions = [run.decision() for run in router.manager.running]
        first, second = (decision for decision in decisions if decision is not None)
        for decision, is_held in ((first, False), (second, True)):
            held = {
                candidate.instance: candidate.held_tokens
                for candidate in decision.candidates
                if candidate.part == "prefill"
            }
            assert (held[first.prefill] > 200) == is_held
            other = next(name for name in held if name != first.prefill)
            assert held[other] == 0
        assert (first.cold, second.cold) == (True, False)
        for worker in cluster.prefills:
            worker.gate.set()
        await asyncio.gather(*asked)
        assert router.fleet.find(Role.PREFILL, first.prefill) is not None
        await eventually(lambda: router.fleet.tokens_in_flight == 0 and not cluster.held)


@pytest.mark.parametrize("prefills", [2, 0])
async def test_simultaneous_siblings_are_placed_by_predicted_blocks(
    model: FakeModel, card: ModelCard, prefills: int
) -> None:
    """All siblings are placed before the first is sent, with prefill workers and with local prefill."""
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(FakeCluster(model, prefills=prefills))
        for worker in cluster.engines:
            worker.gate.clear()
        router = await stack.enter_async_context(open_router(cluster, card))
        asked = GenerationRequest(input=ChatInput(messages=LONG), sampling=Sampling(max_tokens=4))
        runs = [await router.manager.begin(asked, Caller(tenant="default")) for _ in range(3)]
        await eventually(lambda: all(run.decision() is not None for run in runs))
        part = "prefill" if prefills else "local"
        held = []
        for run in runs:
            decision = run.decision()
            assert decision is not None
            held.append(
                max(candidate.held_tokens for candidate in decision.candidates if candidate.part == part)
            )
        assert held[0] == 0 and min(held[1:]) > 200
        await eventually(lambda: sum(len(decode.starts) for decode in cluster.decodes) == len(runs))
        for worker in cluster.engines:
            worker.gate.set()
        for run in runs:
            run.end()
            await run.released.wait()
        await eventually(lambda: router.fleet.tokens_in_flight == 0 and not cluster.held)

"""A request's events from its start to its end, as a reader gets them."""

from __future__ import annotations

import asyncio

import pytest

from services.router.request.model_card import ModelCard
from services.router.request.types import Caller, GenerationRequest, PromptInput, Sampling
from tests.router.conftest import open_router
from tests.router.support.fake_cluster import FakeCluster


@pytest.mark.parametrize("wants_stats", [True, False])
async def test_the_trace_of_a_request_is_sent_on_demand(
    cluster: FakeCluster, card: ModelCard, wants_stats: bool
) -> None:
    request = GenerationRequest(PromptInput("in order"), sampling=Sampling(max_tokens=4))
    async with open_router(cluster, card) as router, asyncio.timeout(60):
        run = await router.manager.begin(request, Caller())
        run.sink.wants_stats = wants_stats
        events = []
        while more := await run.sink.next_events():
            events += more
        await run.released.wait()
    assert [event.WhichOneof("kind") for event in events[:1]] == ["started"]
    finished = events[-1].finished
    assert (finished.usage.completion_tokens, finished.HasField("stats")) == (4, wants_stats)
    assert finished.usage.prompt_tokens == events[0].started.prompt_tokens > 0

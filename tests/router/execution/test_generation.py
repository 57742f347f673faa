"""A request's events from its start to its end, as a reader gets them."""

from __future__ import annotations

import asyncio

import pytest

from services.router.request.model_card import ModelCard
from services.router.request.types import Caller, GenerationRequest, PromptInput, Sampling
from services.router.server import RouterServer
from tests.router.conftest import eventually, open_router, script
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_workers import TOKENS_A_FRAME


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


async def test_tokens_count_while_a_request_runs_and_after_its_client_has_gone(
    cluster: FakeCluster, card: ModelCard
) -> None:
    letter = card.tokenizer.encode_text("a")[0]
    script(cluster.model, [letter] * 40)
    for decode in cluster.decodes:
        decode.gate.clear()  # after the first token and a frame
    request = GenerationRequest(PromptInput("in order"), sampling=Sampling(max_tokens=30))
    async with open_router(cluster, card) as router, asyncio.timeout(60):
        run = await router.manager.begin(request, Caller())
        await eventually(lambda: run.sink.completion_tokens == 1 + TOKENS_A_FRAME)
        assert counted(router) == (run.sink.prompt_tokens, 1 + TOKENS_A_FRAME)
        (worker,) = [decode for decode in cluster.decodes if decode.starts]
        worker.fail_after_tokens = 1
        worker.gate.set()
        shown = 2 * (1 + TOKENS_A_FRAME) + TOKENS_A_FRAME  # another frame, then those of the next attempt
        await eventually(lambda: run.sink.completion_tokens == shown)
        run.end()
        await run.released.wait()
        assert counted(router) == (run.sink.prompt_tokens, shown)
        assert router.counters.total("slipstream_requests_aborted_total") == 1


def counted(router: RouterServer) -> tuple[float, float]:
    """The tokens of prompts and of answers in the router's counters."""
    total = router.counters.total
    return total("slipstream_prompt_tokens_total"), total("slipstream_completion_tokens_total")

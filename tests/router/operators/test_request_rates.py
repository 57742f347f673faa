"""The rates of a router's load report: they follow requests that run, not only those that end."""

from __future__ import annotations

import asyncio

from services.router.operators.request_rates import RequestRates
from services.router.request.model_card import ModelCard
from services.router.request.types import Caller, GenerationRequest, PromptInput, Sampling
from slipstream.v1 import worker_pb2
from tests.router.conftest import eventually, open_router, script
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_workers import TOKENS_A_FRAME


async def test_tokens_of_a_stream_that_runs_are_in_the_rates(cluster: FakeCluster, card: ModelCard) -> None:
    now_s = 0.0
    script(cluster.model, [card.tokenizer.encode_text("a")[0]] * 40)
    for decode in cluster.decodes:
        decode.gate.clear()  # after the first token and a frame
    request = GenerationRequest(PromptInput("in order"), sampling=Sampling(max_tokens=30))
    async with open_router(cluster, card) as router, asyncio.timeout(60):
        rates = RequestRates(router.counters, lambda: now_s)
        rates.add_to(worker_pb2.LoadReport())
        run = await router.manager.begin(request, Caller())
        await eventually(lambda: run.sink.completion_tokens == 1 + TOKENS_A_FRAME)
        now_s = 4.0
        report = rates.add_to(worker_pb2.LoadReport())
        assert router.manager.held == 1
        run.end()
        await run.released.wait()
    assert report.requests_per_s == 1 / 4
    assert report.prompt_tokens_per_s == run.sink.prompt_tokens / 4 > 0
    assert report.generated_tokens_per_s == (1 + TOKENS_A_FRAME) / 4

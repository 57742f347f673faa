"""The rates of a router's load report: they follow requests that run, not only those that end."""

from __future__ import annotations

import asyncio

import pytest

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


async def test_rates_are_recent_although_no_reader_asked_before(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first look at a router that has served for a while shows what it serves."""
    monkeypatch.setattr("services.router.server.WINDOW_S", 0.02)
    async with open_router(cluster, card) as router, asyncio.timeout(60):
        add_to, n_reports = router._rates.add_to, 0

        def counted(report: worker_pb2.LoadReport) -> worker_pb2.LoadReport:
            nonlocal n_reports
            n_reports += 1
            return add_to(report)

        monkeypatch.setattr(router._rates, "add_to", counted)
        await eventually(lambda: n_reports >= 2)

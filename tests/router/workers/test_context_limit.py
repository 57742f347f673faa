"""The context that the router promises is what half of each tier takes; others get shorter requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster.worker_record import Role, Worker
from services.router.request.model_card import ModelCard
from services.router.workers.context_limit import promised_context_tokens
from slipstream.async_client import AsyncClient
from slipstream.errors import InvalidArgument
from tests.router.conftest import HELLO, MAX_CONTEXT_TOKENS, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel

WORKERS = st.builds(
    Worker,
    st.sampled_from(Role),
    st.just("w"),
    st.just("127.0.0.1:1"),
    st.just("i"),
    capacity=st.one_of(st.just({}), st.builds(lambda n: {"max_context_tokens": n}, st.integers(-1, 1 << 40))),
)


@given(st.lists(WORKERS, max_size=6))
def test_half_of_each_tier_takes_what_is_promised_and_no_half_takes_more(workers: list[Worker]) -> None:
    promised = promised_context_tokens(workers)
    tiers = [[w for w in workers if w.role == role] for role in ("prefill", "decode")]

    def is_taken(tokens: int) -> bool:
        return all(2 * sum(w.takes(tokens) for w in tier) >= len(tier) for tier in tiers)

    if promised is None:
        assert is_taken(1 << 60)
    else:
        assert is_taken(promised) and not is_taken(promised + 1)


@given(st.integers(1, 1 << 40), st.integers(0, 3), st.lists(st.integers(1, 1 << 53), max_size=3))
def test_a_minority_of_wrong_bounds_changes_nothing(true: int, surplus: int, wrong: list[int]) -> None:
    def decode(tokens: int) -> Worker:
        return Worker(Role.DECODE, "w", "127.0.0.1:1", "i", capacity={"max_context_tokens": tokens})

    workers = [decode(true) for _ in range(len(wrong) + 1 + surplus)] + [decode(tokens) for tokens in wrong]
    assert promised_context_tokens(workers) == true


@pytest.mark.parametrize("tier", ["prefills", "decodes"])
async def test_a_worker_with_a_small_context_gets_none_of_the_requests_beyond_it(
    model: FakeModel, card: ModelCard, tier: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster(model)
    small, large = getattr(cluster, tier)
    for worker, tokens in ((small, 1), (large, MAX_CONTEXT_TOKENS)):
        worker.worker = replace(worker.worker, capacity={"max_context_tokens": tokens})
    async with cluster, open_router(cluster, card) as router:
        async with AsyncClient(router.host.endpoint) as client:
            for index in range(12):
                reply = await client.complete(f"{index}" + " word" * 20, max_tokens=3)
                assert reply.finish_reason == "length"
        assert router.manager.context.card.max_context_tokens == MAX_CONTEXT_TOKENS
        placed = {
            name
            for timeline in router.recorder.newest_first()
            for name in (timeline.prefill, timeline.decode)
        }
        assert large.worker.instance in placed and small.worker.instance not in placed
        assert f"{small.worker.instance} takes 1 tokens of context" in caplog.text
        link = router.fleet.find(large.worker.role, large.worker.instance)
        assert link is not None
        assert not router.fleet.has_substitute(link, context_tokens=2)
        assert router.fleet.has_substitute(link, context_tokens=1)


@pytest.mark.parametrize("tier", ["prefills", "decodes"])
async def test_the_models_page_and_the_refusal_name_the_bound_of_the_workers(
    model: FakeModel, card: ModelCard, tier: str
) -> None:
    cluster = FakeCluster(model)
    small, large = getattr(cluster, tier)
    for worker, tokens in ((small, 32), (large, 64)):
        worker.worker = replace(worker.worker, capacity={"max_context_tokens": tokens})
    async with cluster, open_router(cluster, card) as router:
        url = f"http://{router.http_endpoint}"
        async with aiohttp.ClientSession(url) as http, AsyncClient(router.host.endpoint) as client:
            assert await _context(http) == 64
            for field, limit in (("max_tokens", 64), ("max_tokens", 65), ("max_completion_tokens", 4096)):
                body: dict[str, Any] = {"messages": HELLO, field: limit}
                async with http.post("/v1/chat/completions", json=body) as response:
                    error = (await response.json())["error"]
                assert (response.status, error["code"]) == (400, "context_length_exceeded")
                assert error["param"] == field
                assert "maximum context length is 64 tokens. However, you requested" in error["message"]
            with pytest.raises(InvalidArgument, match="64 tokens"):
                await client.complete("word " * 100)
            await large.stop()
            await eventually(lambda: router.manager.context.card.max_context_tokens == 32)
            assert await _context(http) == 32


async def _context(http: aiohttp.ClientSession) -> int:
    async with http.get("/v1/models") as response:
        [model] = (await response.json())["data"]
    assert model["max_model_len"] == model["context_length"]
    return int(model["context_length"])

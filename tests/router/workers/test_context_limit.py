"""The context that the router promises is what every worker of the fleet takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster.worker_record import Role, Worker
from services.router.request.model_card import ModelCard
from services.router.workers.context_limit import least_context_tokens
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
def test_the_least_stated_bound_of_prefill_and_decode_counts(workers: list[Worker]) -> None:
    least = least_context_tokens(workers)
    stated = [w.capacity.get("max_context_tokens", 0) for w in workers if w.role in ("prefill", "decode")]
    valid = [tokens for tokens in stated if tokens > 0]
    assert least == (min(valid) if valid else None)


@pytest.mark.parametrize("tier", ["prefills", "decodes"])
async def test_the_models_page_and_the_refusal_name_the_bound_of_the_workers(
    model: FakeModel, card: ModelCard, tier: str
) -> None:
    cluster = FakeCluster(model)
    small = getattr(cluster, tier)[1]
    small.worker = replace(small.worker, capacity={"max_context_tokens": 64})
    async with cluster, open_router(cluster, card) as router:
        url = f"http://{router.http_endpoint}"
        async with aiohttp.ClientSession(url) as http, AsyncClient(router.host.endpoint) as client:
            assert await _context(http) == 64
            body: dict[str, Any] = {"messages": HELLO, "max_tokens": 64}
            async with http.post("/v1/chat/completions", json=body) as response:
                error = (await response.json())["error"]
            assert (response.status, error["code"]) == (400, "context_length_exceeded")
            assert "maximum context length is 64 tokens" in error["message"]
            with pytest.raises(InvalidArgument, match="64 tokens"):
                await client.complete("word " * 100)
            await small.stop()
            await eventually(lambda: router.runs.context.card.max_context_tokens == MAX_CONTEXT_TOKENS)
            assert await _context(http) == MAX_CONTEXT_TOKENS


async def _context(http: aiohttp.ClientSession) -> int:
    async with http.get("/v1/models") as response:
        [model] = (await response.json())["data"]
    assert model["max_model_len"] == model["context_length"]
    return int(model["context_length"])

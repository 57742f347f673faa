"""Workers with different context bounds, and false ones: who gets a request, and where its answer ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from tests.router.conftest import MAX_CONTEXT_TOKENS, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel, hashed_answer
from tests.router.support.fake_workers import FakeDecode

SMALL, LARGE, HUGE = 100, 200, 1 << 40
PROMPT = "Where is my order?"


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.execution.policies.context_room.OPEN_OUTPUT_TOKENS", 8)


@pytest.fixture
def endless(card: ModelCard) -> FakeModel:
    """A model whose answers only end at their bound."""
    letters = [card.tokenizer.encode_text(letter)[0] for letter in "abcdefgh"]
    return FakeModel(hashed_answer(letters, end=letters[0], length=MAX_CONTEXT_TOKENS))


@asynccontextmanager
async def opened(
    model: FakeModel, card: ModelCard, bounds: Sequence[tuple[int, int]]
) -> AsyncIterator[tuple[FakeCluster, RouterServer, AsyncClient]]:
    """A prefill and a decode worker for each bound: (what it takes, what it states)."""
    cluster = FakeCluster(model, prefills=len(bounds), decodes=len(bounds))
    for workers in (cluster.prefills, cluster.decodes):
        for worker, (taken, stated) in zip(workers, bounds, strict=True):
            worker.take_context(taken, stated_tokens=stated)
    async with (
        cluster,
        open_router(cluster, card) as router,
        AsyncClient(router.host.endpoint, resume_within_s=0.0) as client,
    ):
        yield cluster, router, client


async def total_tokens(client: AsyncClient, prompt: str) -> int:
    """Tokens of a prompt and its answer, which ends at its length."""
    reply = await client.complete(prompt)
    assert reply.finish_reason == "length" and reply.usage is not None
    return reply.usage.prompt_tokens + reply.usage.completion_tokens


async def test_requests_without_max_tokens_use_all_workers_and_end_at_the_bound_of_theirs(
    endless: FakeModel, card: ModelCard
) -> None:
    async with opened(endless, card, [(SMALL, SMALL), (LARGE, LARGE)]) as (cluster, router, client):
        assert router.manager.context.card.max_context_tokens == LARGE
        totals = await asyncio.gather(*(total_tokens(client, f"{i} {PROMPT}") for i in range(12)))
        small, large = cluster.decodes
        assert small.starts and large.starts
        assert totals.count(SMALL) == len(small.starts) and totals.count(LARGE) == len(large.starts)
        # What a client states is kept: only the large worker has room for it.
        n_small = len(small.starts)
        for i in range(4):
            reply = await client.complete(f"{i} {PROMPT}", max_tokens=SMALL)
            assert reply.usage is not None and reply.usage.completion_tokens == SMALL
        assert len(small.starts) == n_small


async def test_false_workers_in_both_tiers_draw_no_more_than_their_share(
    endless: FakeModel, card: ModelCard
) -> None:
    async with opened(endless, card, [(SMALL, HUGE), (SMALL, SMALL)]) as (cluster, router, client):
        assert router.manager.context.card.max_context_tokens == MAX_CONTEXT_TOKENS
        false, honest = cluster.decodes
        for (
            worker
        ) in cluster.decodes:  # on a slow machine answers would end before the next request is placed
            worker.gate.clear()
        asked = asyncio.gather(*(total_tokens(client, f"{i} {PROMPT}") for i in range(16)))
        await eventually(lambda: len(false.starts) + len(honest.starts) == 16)
        for worker in cluster.decodes:
            worker.gate.set()
        totals = await asked
        assert set(totals) == {SMALL}
        assert len(honest.starts) >= len(totals) // 4 and false.starts


async def test_a_prompt_that_a_false_worker_refuses_runs_on_another(
    endless: FakeModel, card: ModelCard
) -> None:
    bounds = [(8, HUGE), (SMALL, SMALL)]
    async with opened(endless, card, bounds) as (cluster, _, client):
        totals = await asyncio.gather(*(total_tokens(client, f"{i} {PROMPT}") for i in range(12)))
        assert set(totals) == {SMALL}
        assert cluster.prefills[0].requests or cluster.decodes[0].starts  # it was tried
        with pytest.raises(errors.ContextExceeded):
            await client.complete("word " * SMALL)


@pytest.mark.parametrize(("first", "second"), [(LARGE, SMALL), (SMALL, LARGE)])
@pytest.mark.parametrize("max_tokens", [None, 80])
async def test_a_failover_keeps_the_cap_or_lowers_it_and_never_changes_the_text(
    endless: FakeModel, card: ModelCard, first: int, second: int, max_tokens: int | None
) -> None:
    stated: Any = {} if max_tokens is None else {"max_tokens": max_tokens}
    async with opened(endless, card, [(first, first)]) as (cluster, _, client):
        whole = await client.complete(PROMPT, seed=1, **stated)
        assert whole.usage is not None
        [worker] = cluster.decodes
        worker.gate.clear()
        stream = client.stream_complete(PROMPT, seed=1, **stated)
        events = aiter(stream)
        await anext(events)
        await eventually(lambda: bool(worker.held))
        await restart(cluster, worker, second)
        worker.gate.set()
        assert [event async for event in events]
        assert stream.reply.finish_reason == "length" and stream.reply.usage is not None
        n = stream.reply.usage.completion_tokens
        assert n == min(whole.usage.completion_tokens, second - whole.usage.prompt_tokens)
        assert whole.text.startswith(stream.reply.text)


async def test_a_placed_request_is_placed_again_after_its_worker_came_back_smaller(
    endless: FakeModel, card: ModelCard
) -> None:
    async with opened(endless, card, [(LARGE, LARGE)]) as (cluster, _, client):
        for prefill in cluster.prefills:
            prefill.gate.clear()
        open_ended = asyncio.create_task(total_tokens(client, PROMPT))
        stated = asyncio.create_task(client.complete(PROMPT, max_tokens=SMALL))
        [worker] = cluster.decodes
        await eventually(lambda: len(worker.held) == 2)
        await restart(cluster, worker, SMALL)
        for prefill in cluster.prefills:  # else its first token would be the answer's begin
            prefill.fail_before_token = errors.Unavailable("gone")
            prefill.gate.set()
        assert await open_ended == SMALL
        with pytest.raises(errors.ContextExceeded, match=f"context length is {SMALL} tokens") as refused:
            await stated
        assert refused.value.field == "max_tokens"


async def test_an_answer_that_no_worker_has_room_for_any_more_ends_at_its_length(
    endless: FakeModel, card: ModelCard
) -> None:
    async with opened(endless, card, [(LARGE, LARGE)]) as (cluster, _, client):
        [worker] = cluster.decodes
        worker.gate.clear()
        stream = client.stream_complete(PROMPT, seed=1)
        events = aiter(stream)
        await anext(events)
        await eventually(lambda: bool(worker.held))
        await restart(cluster, worker, 4)
        worker.gate.set()
        async for _ in events:
            pass
        assert stream.reply.finish_reason == "length" and stream.reply.text


async def restart(cluster: FakeCluster, worker: FakeDecode, tokens: int) -> None:
    """End a worker, and start it again with another bound."""
    await worker.kill()
    again = cluster.add_decode(worker.instance)
    again.take_context(tokens)
    await again.start()


async def test_a_requested_prefill_worker_that_is_too_small_is_a_typed_error_at_once(
    endless: FakeModel, card: ModelCard
) -> None:
    cluster = FakeCluster(endless, prefills=2, decodes=1)
    small = cluster.prefills[0]
    small.take_context(4)
    async with (
        cluster,
        open_router(cluster, card, allow_requested_prefill=True, recovery_wait_s=0.5) as router,
        AsyncClient(router.host.endpoint, resume_within_s=0.0) as client,
    ):
        assert (await client.complete(PROMPT, max_tokens=1)).finish_reason == "length"
        requested = {"x-slipstream-prefill": small.instance}
        with pytest.raises(errors.ContextExceeded) as refused:
            await client.complete(PROMPT, max_tokens=1, headers=requested)
        assert refused.value.field == "prompt"
        assert not small.requests
        await eventually(lambda: not cluster.held and not router.manager.held)

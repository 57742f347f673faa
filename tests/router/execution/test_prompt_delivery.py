"""Log probabilities of prompts through the router: lost workers, choices, slow clients, bounds."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import aiohttp
import msgspec
import pytest

from services.router.request.model_card import ModelCard
from services.router.request.prompt_rows import PromptRows
from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.replies import Logprob, Reply
from tests.router.conftest import HELLO, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster

PROMPT = "Where is my order? " * 20


def check(reply: Reply, *, top: int) -> None:
    """All rows once, in order, before the answer."""
    assert reply.usage is not None
    rows: list[Logprob] = reply.prompt_logprobs
    assert len(rows) == reply.usage.prompt_tokens
    assert [row.rank for row in rows] == [0] + [2] * (len(rows) - 1)
    assert [row.logprob for row in rows] == [-position / 8 for position in range(len(rows))]
    assert b"".join(row.token_bytes for row in rows).decode() == PROMPT
    assert all([item.token_id for item in row.top] == [row.token_id] * top for row in rows[1:])


@pytest.mark.parametrize("top", [0, 3, 20])
async def test_rows_come_from_prefill_alone(client: AsyncClient, cluster: FakeCluster, top: int) -> None:
    """And the decode worker, which gets the handoff, is not asked for them."""
    check(await client.complete(PROMPT, prompt_logprobs=top, seed=1), top=top)
    starts = [start for worker in cluster.decodes for start in worker.starts]
    assert starts and not any(start.sampling.HasField("prompt_logprobs") for start in starts)


async def test_a_prefill_worker_that_fails_amid_its_rows_costs_no_row(
    client: AsyncClient, cluster: FakeCluster
) -> None:
    before = await client.complete(PROMPT, prompt_logprobs=1, seed=1)
    for position in (1, 8, 71):
        broken, other = cluster.prefills[:2]
        broken.fail_at_position = position
        for _ in range(8):
            reply = await client.complete(PROMPT, prompt_logprobs=1, seed=1)
            check(reply, top=1)
            assert reply.text == before.text
            assert reply.stats is not None
            if reply.stats.attempts > 1:
                break
        else:
            raise AssertionError(f"no attempt began at {broken.instance}")
        assert other.requests[-1].sampling.HasField("prompt_logprobs")
        broken.fail_at_position = None
    await eventually(lambda: not cluster.held)


async def test_an_attempt_after_the_rows_does_not_ask_for_them_again(
    client: AsyncClient, cluster: FakeCluster
) -> None:
    for worker in cluster.decodes:
        worker.fail_after_tokens = 6
    reply = await client.complete(PROMPT, prompt_logprobs=1, seed=1)
    check(reply, top=1)
    asked = [request for worker in cluster.prefills for request in worker.requests]
    later = [request for request in asked if request.attempt.attempt > 1]
    assert later and not any(request.sampling.HasField("prompt_logprobs") for request in later)


async def test_without_prefill_workers_the_decode_worker_sends_the_rows(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with open_router(cluster, card) as router, AsyncClient(router.host.endpoint) as client:
        before = await client.complete(PROMPT, prompt_logprobs=2, seed=1)
        for worker in cluster.prefills:
            await worker.kill()
        reply = await client.complete(PROMPT, prompt_logprobs=2, seed=1)
        assert reply.stats is not None and reply.stats.prefill_worker == ""
        assert reply.text == before.text
        check(reply, top=2)


async def test_a_prompt_that_is_computed_whole_is_placed_as_if_nothing_were_cached(
    client: AsyncClient,
) -> None:
    await client.complete(PROMPT, seed=1)
    plain = await client.complete(PROMPT, seed=1)
    scored = await client.complete(PROMPT, seed=1, prompt_logprobs=0)
    assert plain.stats is not None and "holds 159 of 160 tokens" in plain.stats.reason
    assert scored.stats is not None and "holds" not in scored.stats.reason


async def test_only_the_first_choice_of_a_prompt_asks(
    client: AsyncClient, cluster: FakeCluster, router: RouterServer
) -> None:
    reply = await client.complete(PROMPT, prompt_logprobs=1, n=3, seed=1)
    check(reply, top=1)
    assert not any(choice.prompt_logprobs for choice in reply.others)
    asked = [request for worker in cluster.prefills for request in worker.requests]
    assert sum(request.sampling.HasField("prompt_logprobs") for request in asked) == 1
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
        body: dict[str, Any] = {"prompt": [PROMPT, "Hello"], "n": 2, "echo": True, "logprobs": 1, "seed": 1}
        async with http.post("/v1/completions", json=body) as answer:
            choices = (await answer.json())["choices"]
        assert [c["text"].startswith(p) for c, p in zip(choices, [PROMPT] * 2 + ["Hello"] * 2, strict=True)]
        n = len(reply.prompt_logprobs)
        prompts = [choice["logprobs"]["token_logprobs"][:n] for choice in choices]
        assert prompts[0] == prompts[1] == [None, *(-position / 8 for position in range(1, n))]
        assert prompts[2][:2] == prompts[3][:2] == [None, -0.125]
        events = []
        async with http.post("/v1/completions", json=body | {"stream": True}) as answer:
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    events.append(msgspec.json.decode(line[6:])["choices"][0])
    for choice in choices:
        pieces = [event for event in events if event["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        for name, whole in choice["logprobs"].items():
            joined = [item for p in pieces if p["logprobs"] for item in p["logprobs"][name]]
            assert joined == whole, name


async def test_a_resumed_request_has_no_rows(client: AsyncClient, cluster: FakeCluster) -> None:
    """Its client has tokens of the answer, and so all rows."""
    from slipstream.v1 import router_pb2, router_pb2_grpc

    request = router_pb2.GenerateRequest(prompt=PROMPT, request_id="r", resume_after_tokens=3)
    request.sampling.prompt_logprobs = 1
    stub = client._endpoints.all(router_pb2_grpc.RouterServiceStub)[0]
    deltas = [e.delta async for r in stub.Generate(request) for e in r.events]
    assert any(delta.text for delta in deltas)
    assert not any(delta.prompt_logprobs for delta in deltas)


async def test_a_client_that_reads_late_gets_rows_and_answer_in_order(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sink is full after each piece, so that rows and tokens wait in the request."""
    monkeypatch.setattr("services.router.execution.event_queue.MAX_WAITING_BYTES", 64)
    monkeypatch.setattr(
        "services.router.execution.event_queue.ResponseQueue.__init__.__kwdefaults__",
        {"max_waiting_bytes": 64},
    )
    stream = client.stream_complete(PROMPT, prompt_logprobs=20, seed=1)
    events = []
    async for event in stream:
        events.append(event)
        await asyncio.sleep(0)
    check(stream.reply, top=20)
    first_text = next(i for i, event in enumerate(events) if event.completion_tokens)
    assert not any(event.prompt_logprobs for event in events[first_text + 1 :])
    assert len(stream.reply.text) > 10


async def test_rows_of_all_prompts_together_are_bounded(cluster: FakeCluster, card: ModelCard) -> None:
    large = dataclasses.replace(card, model_context_tokens=16_384)
    ids = [5] * 2000
    async with open_router(cluster, large) as router:
        async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
            for body in (
                {"prompt": [7] * 6300, "prompt_logprobs": 20},
                {"prompt": [ids] * 4, "echo": True, "logprobs": 20},
                {"prompt": [ids], "n": 4, "prompt_logprobs": 20},
            ):
                async with http.post("/v1/completions", json=body) as answer:
                    assert answer.status == 400
                    error = (await answer.json())["error"]
                    assert error["param"] == "prompt_logprobs"
                    assert "must have at most 131072 log probabilities of prompts, not 1" in error["message"]
            # A chat's answer has the rows once, beside its choices.
            chat = {"messages": [{"role": "user", "content": "zq " * 1000}], "n": 4, "prompt_logprobs": 20}
            async with http.post("/v1/chat/completions", json=chat) as answer:
                whole = await answer.json()
                assert answer.status == 200, whole
            assert 4 * 21 * len(whole["prompt_logprobs"]) > 1 << 17 and len(whole["choices"]) == 4
        async with AsyncClient(router.host.endpoint) as client:
            with pytest.raises(errors.InvalidArgument, match="at most 131072 log probabilities"):
                await client.complete("zq " * 3000, prompt_logprobs=20)
            await client.chat(HELLO, prompt_logprobs=20)
        await eventually(lambda: not cluster.held)


async def test_a_piece_that_cannot_be_written_ends_its_request_alone(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces are written in rounds that all requests of a router share."""
    pop_event = PromptRows.pop_event

    def fail(rows: PromptRows) -> Any:
        if rows.taken > 8:
            raise ValueError("no such token")
        return pop_event(rows)

    monkeypatch.setattr(PromptRows, "pop_event", fail)
    async with asyncio.timeout(30):
        for _ in range(2):
            with pytest.raises(errors.Internal):
                await client.complete(PROMPT, prompt_logprobs=1, seed=1)
        assert (await client.complete(PROMPT, seed=1)).text


async def test_a_worker_that_leaves_rows_out_gives_no_answer(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older worker does not know what it is asked for."""
    monkeypatch.setattr("tests.router.support.fake_workers.prompt_pieces", lambda *_: iter(()))
    async with asyncio.timeout(30):
        with pytest.raises(errors.Internal):
            await client.complete(PROMPT, prompt_logprobs=1, seed=1)
        assert (await client.complete(PROMPT, seed=1)).text

"""A first token goes to its client before anything is learnt from it, and waits for nobody else's sake."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import pytest

from services.router.api.event_stream import Event, EventStream
from services.router.execution.attempt_types import TokenBatch
from services.router.execution.dispatcher import Assignment
from services.router.execution.event_queue import ResponseQueue
from services.router.execution.running_request import RunningRequest
from services.router.request.model_card import ModelCard
from services.router.request.types import Caller, ChatInput, GenerationRequest, Sampling
from services.router.server import RouterServer
from tests.router.conftest import HELLO, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.defaults import set_default

_UNREAD_BYTES = 1  # a request waits once its client leaves so much unread


@pytest.fixture(autouse=True)
def at_once(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are computed in no time, and clients that do not read are waited for."""
    for prefill in cluster.prefills:
        prefill.tells_progress = False
    set_default(monkeypatch, ResponseQueue.__init__, "max_waiting_bytes", _UNREAD_BYTES)


async def begin(router: RouterServer) -> RunningRequest:
    request = GenerationRequest(input=ChatInput(messages=HELLO), sampling=Sampling(max_tokens=20))
    return await router.runs.begin(request, Caller(tenant="default"))


async def read_first(run: RunningRequest) -> None:
    """Read up to the first token, and no more."""
    while not any(event.HasField("delta") for event in await run.sink.next_events()):
        pass


def prompts(cluster: FakeCluster) -> int:
    return sum(len(prefill.requests) for prefill in cluster.prefills)


async def test_a_lone_request_is_answered_whole(cluster: FakeCluster, card: ModelCard) -> None:
    async with open_router(cluster, card) as router:
        run, tokens = await begin(router), 0
        while events := await run.sink.next_events():
            tokens = events[-1].finished.usage.completion_tokens
        assert tokens > 1
        run.end()
        await run.released.wait()
    assert not cluster.held


async def test_a_handoff_does_not_wait_for_a_client_that_reads_nothing(
    cluster: FakeCluster, card: ModelCard
) -> None:
    for decode in cluster.decodes:
        decode.fail_after_tokens = 3
    async with open_router(cluster, card) as router:
        run = await begin(router)
        await read_first(run)
        await eventually(lambda: prompts(cluster) == 2)
        await eventually(lambda: sum(len(decode.starts) for decode in cluster.decodes) == 2)
        assert run.sink.waiting_bytes >= _UNREAD_BYTES
        run.end()
        await run.released.wait()
    assert not cluster.held


async def test_a_move_is_over_before_its_client_reads(cluster: FakeCluster, card: ModelCard) -> None:
    for decode in cluster.decodes:
        decode.gate.clear()
    async with open_router(cluster, card) as router:
        run = await begin(router)
        await read_first(run)
        await eventually(lambda: any(decode.starts for decode in cluster.decodes))
        (busy,) = [decode for decode in cluster.decodes if decode.starts]
        draining = asyncio.create_task(busy.service.drain())
        await eventually(lambda: prompts(cluster) == 2)
        await eventually(lambda: run.sink.waiting_bytes >= _UNREAD_BYTES)
        await eventually(lambda: router.runs.context.failover.drain_limiter.moving == 0)
        run.end()
        await run.released.wait()
        await draining
    assert not cluster.held


async def test_it_is_with_its_client_before_anything_is_learnt_from_it(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    try_write, observe = EventStream.try_write, Assignment.observe

    def sends(self: EventStream, events: Sequence[Event]) -> bool:
        sent = try_write(self, events)
        order.append("sent" if sent else "left")
        return sent

    def learns(self: Assignment, batch: TokenBatch) -> None:
        order.append("learnt")
        observe(self, batch)

    monkeypatch.setattr(EventStream, "try_write", sends)
    monkeypatch.setattr(Assignment, "observe", learns)
    for prefill in cluster.prefills:
        prefill.gate.clear()
    async with open_router(cluster, card) as router:
        url = f"http://{router.http_endpoint}/v1/chat/completions"
        async with aiohttp.ClientSession() as http:
            body = {"messages": HELLO, "stream": True, "max_tokens": 8}
            asking = asyncio.create_task(http.post(url, json=body).__aenter__())
            await eventually(lambda: prompts(cluster) == 1)
            # Its handoff is known and it waits for the token alone: its decode sequence has begun.
            await eventually(lambda: any(decode.starts for decode in cluster.decodes))
            for prefill in cluster.prefills:
                prefill.gate.set()
            async with await asking as answer:
                assert (await answer.text()).endswith("data: [DONE]\n\n")
    assert order[:2] == ["sent", "learnt"]

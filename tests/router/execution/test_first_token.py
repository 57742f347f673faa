"""A first token is sent to its client before other work, and no client delays other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import pytest

from services.router.api.http.event_stream import Event, EventStream
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

_UNREAD_BYTES = 1  # the unread bytes at which a request pauses


@pytest.fixture(autouse=True)
def instant_prefill(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are computed at once, and clients may leave their answers unread."""
    for prefill in cluster.prefills:
        prefill.tells_progress = False
    set_default(monkeypatch, ResponseQueue.__init__, "max_waiting_bytes", _UNREAD_BYTES)


async def begin(router: RouterServer) -> RunningRequest:
    request = GenerationRequest(input=ChatInput(messages=HELLO), sampling=Sampling(max_tokens=20))
    return await router.manager.begin(request, Caller(tenant="default"))


async def read_first(run: RunningRequest) -> None:
    """Read events up to the first token."""
    while not any(event.HasField("delta") for event in await run.sink.next_events()):
        pass


def prompts(cluster: FakeCluster) -> int:
    return sum(len(prefill.requests) for prefill in cluster.prefills)


async def test_a_lone_request_gets_its_whole_answer(cluster: FakeCluster, card: ModelCard) -> None:
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


async def test_a_move_to_another_worker_ends_before_its_client_reads(
    cluster: FakeCluster, card: ModelCard
) -> None:
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
        await eventually(lambda: router.manager.context.failover.drain_limiter.moving == 0)
        run.end()
        await run.released.wait()
        await draining
    assert not cluster.held


async def test_a_first_token_is_sent_before_the_models_observe_it(
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
            # The decode sequence has started, so the request only waits for its first token.
            await eventually(lambda: any(decode.starts for decode in cluster.decodes))
            for prefill in cluster.prefills:
                prefill.gate.set()
            async with await asking as answer:
                assert (await answer.text()).endswith("data: [DONE]\n\n")
    assert order[:2] == ["sent", "learnt"]

"""Streams of one tenant that read nothing take no place of another tenant, and go on when they are read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from libs.common.http import connection
from libs.common.service_bounds import RESUME_PAUSE_S
from services.router.execution.event_queue import ResponseQueue
from services.router.recording.timeline import RequestTimeline
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.api.http.test_slow_readers import BODY, RawClient
from tests.router.conftest import WAIT_S, eventually, open_router, script
from tests.router.support.answer_events import sse_objects
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys

STREAMS = 4
LETTERS = "abcdefgh"
TOKENS = 800
# Without log probabilities an answer has many fewer bytes.
BARE_WORD, BARE_TOKENS = " functions", 1900
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
KEYS = {"key-a": "a", "key-b": "b"}


@contextlib.asynccontextmanager
async def crowded(
    cluster: FakeCluster, card: ModelCard, words: Sequence[str] = LETTERS * (TOKENS // 8)
) -> AsyncIterator[RouterServer]:
    """A router with places for STREAMS requests, and answers longer than every buffer on the way."""
    ids = {word: card.tokenizer.encode_text(word)[0] for word in set(words)}
    script(cluster.model, [*(ids[word] for word in words), card.stop_token_ids[0]])
    keys = tenant_keys(KEYS)
    # No client is cut off in the time of this test.
    async with open_router(
        cluster, card, keys=keys, max_requests=STREAMS, write_stall_s=10 * WAIT_S
    ) as router:
        yield router


async def check_others(router: RouterServer) -> None:
    """Another tenant is served while the unread streams wait."""
    async with AsyncClient(router.host.endpoint, api_key="key-b", timeout_s=WAIT_S) as other:
        assert (await other.complete("y", max_tokens=5)).finish_reason == "length"
    assert router.manager.held == STREAMS  # none of the unread ones was ended for it
    await eventually(lambda: all(run.is_suspended for run in router.manager.running))
    assert router.manager.gate.controller.running == 0


@pytest.fixture(params=[1, 3], ids=["one connection", "three connections"])
def connections(request: pytest.FixtureRequest) -> int:
    return int(request.param)


async def test_unread_grpc_streams_hold_up_no_other_tenant(
    cluster: FakeCluster, card: ModelCard, connections: int
) -> None:
    async with crowded(cluster, card) as router, contextlib.AsyncExitStack() as stack:
        calls = []
        channels = [
            await stack.enter_async_context(
                grpc.aio.insecure_channel(router.host.endpoint, options=[*SMALL_WINDOW, ("n", index)])
            )
            for index in range(connections)
        ]
        for index in range(STREAMS):
            stub: Any = router_pb2_grpc.RouterServiceStub(channels[index % connections])
            sampling = router_pb2.Sampling(top_logprobs=20)
            request = router_pb2.GenerateRequest(prompt=f"x{index}", sampling=sampling)
            calls.append(stub.Generate(request, metadata=(("x-api-key", "key-a"),), timeout=10 * WAIT_S))
        await eventually(lambda: router.manager.held == STREAMS)
        await check_others(router)
        async with asyncio.timeout(WAIT_S):
            texts = await asyncio.gather(*map(read_text, calls))
        expected = "".join(LETTERS[index % 8] for index in range(TOKENS))
        assert texts == [expected] * STREAMS
        await eventually(lambda: not router.manager.held and not cluster.held)
        for timeline in router.recorder.newest_first():
            if timeline.tenant == "a":
                kinds = [entry.kind for entry in timeline.entries]
                assert 0 < kinds.count("suspended") <= kinds.count("resumed") + 1
                check_pace(timeline)
                assert timeline.curve.count == TOKENS + 1 and timeline.status == "succeeded"


def check_pace(timeline: RequestTimeline) -> None:
    """A request goes on after the least time, which doubles with each suspension."""
    suspended, least_s = 0.0, RESUME_PAUSE_S[0]
    for entry in timeline.entries:
        if entry.kind == "suspended":
            suspended = entry.at_s
        elif entry.kind == "resumed":
            assert entry.at_s - suspended >= 0.99 * least_s
            least_s = min(2 * least_s, RESUME_PAUSE_S[1])


async def read_text(call: Any) -> str:
    return "".join([event.delta.text async for response in call for event in response.events])


async def unread_streams(router: RouterServer) -> list[RawClient]:
    """Clients of tenant A that read nothing, all suspended, while other tenants are served."""
    router.ports.http.setsockopt(1, 7, 1 << 12)  # SO_SNDBUF
    clients = [RawClient("key-a") for _ in range(STREAMS)]
    for index, client in enumerate(clients):
        messages = [{"role": "user", "content": f"x{index}"}]
        await client.post(router.http_endpoint, {**BODY, "messages": messages})
    await eventually(lambda: router.manager.held == STREAMS)
    await check_others(router)
    return clients


async def check_texts(clients: Sequence[RawClient]) -> None:
    """Read all answers, which are whole."""
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*[client.read_all() for client in clients])
    for client in clients:
        choices = [choice for event in client.events() for choice in event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        assert text == "".join(LETTERS[index % 8] for index in range(TOKENS))
        client.socket.close()


async def test_suspended_streams_go_on_where_their_workers_have_died(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with crowded(cluster, card) as router:
        clients = await unread_streams(router)
        for worker in (cluster.prefills[0], cluster.decodes[0]):
            await worker.stop()
        await check_texts(clients)
        await eventually(lambda: not router.manager.held)


async def test_unread_http_streams_hold_up_no_other_tenant(cluster: FakeCluster, card: ModelCard) -> None:
    async with crowded(cluster, card) as router:
        clients = await unread_streams(router)
        await check_texts(clients)
        await eventually(lambda: not router.manager.held and not cluster.held)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_unread_streams_of_the_other_apis_hold_up_no_other_tenant(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    words: Sequence[str] = LETTERS * (TOKENS // 8)
    if path == "/v1/messages":  # it has no log probabilities, so the buffers are made shorter
        words = [BARE_WORD] * BARE_TOKENS
        monkeypatch.setattr(connection, "HTTP_UNWRITTEN_BYTES", 1 << 10)
        monkeypatch.setitem(ResponseQueue.__init__.__kwdefaults__ or {}, "max_waiting_bytes", 64)
    async with crowded(cluster, card, words) as router:
        router.ports.http.setsockopt(1, 7, 1 << 12)  # SO_SNDBUF
        clients = [RawClient("key-a") for _ in range(STREAMS)]
        for index, client in enumerate(clients):
            body: dict[str, Any] = {"stream": True}
            if path == "/v1/responses":
                body |= {
                    "input": f"x{index}",
                    "include": ["message.output_text.logprobs"],
                    "top_logprobs": 20,
                }
            else:
                body |= {"messages": [{"role": "user", "content": f"x{index}"}], "max_tokens": len(words) + 1}
            await client.post(router.http_endpoint, body, path=path)
        await eventually(lambda: router.manager.held == STREAMS)
        await eventually(lambda: all(run.sink.is_full for run in router.manager.running))
        await check_others(router)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*[client.read_all() for client in clients])
        for client in clients:
            kinds = ("response.output_text.delta", "content_block_delta")
            deltas = [each["delta"] for each in sse_objects(client.body()) if each["type"] in kinds]
            text = "".join(each if isinstance(each, str) else each.get("text", "") for each in deltas)
            assert text == "".join(words)
            client.socket.close()
        await eventually(lambda: not router.manager.held and not cluster.held)

"""gRPC calls whose clients read nothing: each ends for the router within a bound and leaves no task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from libs.common.rpc import serve
from services.router.api.rpc.call_answer import CallAnswer
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import WAIT_S, eventually, hasten_writes, open_router, script
from tests.router.support.fake_cluster import FakeCluster

LETTERS = "abcdefgh"
# A client with a fixed, small window, so that what it leaves unread fills the way soon.
SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]
REQUEST = router_pb2.GenerateRequest(
    prompt="x", request_id="r-1", sampling=router_pb2.Sampling(top_logprobs=20)
)


HANDLER = "HandleExceptions["


def call_tasks() -> int:
    """The handlers of Generate, and the tasks of gRPC for calls without a handler."""
    names = [task.get_name() for task in asyncio.all_tasks()]
    handlers = [name for name in names if name.startswith(HANDLER)]
    generating = sum(name.endswith("/Generate]") for name in handlers)
    return generating + names.count("rpc_task") - len(handlers)


@asynccontextmanager
async def unread_call(router: RouterServer, model: Any, card: ModelCard) -> AsyncIterator[Any]:
    """A call whose answer fills the way to its client, which reads nothing."""
    letters = [card.tokenizer.encode_text(letter)[0] for letter in LETTERS]
    script(model, [*letters * 200, card.stop_token_ids[0]])
    async with grpc.aio.insecure_channel(router.host.endpoint, options=SMALL_WINDOW) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        await stub.ListModels(router_pb2.ListModelsRequest())  # gRPC keeps the first call of a server
        call = stub.Generate(REQUEST)
        await call.initial_metadata()
        await eventually(lambda: any(run.sink.is_full for run in router.manager.running))
        yield call


async def abort(router: RouterServer) -> None:
    async with AsyncClient(router.host.endpoint) as client:
        await client.abort("r-1")


async def pass_deadline(router: RouterServer) -> None:
    for run in router.manager.running:
        run.end_at_deadline()


async def hand_over(router: RouterServer) -> None:
    for run in router.manager.running:
        run.end(errors.Draining("this router is draining"))


@pytest.mark.parametrize("end", [abort, pass_deadline, hand_over])
async def test_a_call_that_ends_while_its_client_reads_nothing_leaves_no_task(
    cluster: FakeCluster, card: ModelCard, end: Callable[[RouterServer], Any]
) -> None:
    async with open_router(cluster, card) as router, unread_call(router, cluster.model, card) as call:
        await end(router)
        await eventually(lambda: not router.manager.held and not cluster.held)
        assert call_tasks() == 1  # the client may still read its status
        router._grpc.generation.reset_s = 0.1
        hasten_writes(stall_s=WAIT_S, reset_s=0.1)
        await eventually(lambda: not call_tasks())
        async with AsyncClient(router.host.endpoint) as other:
            assert await other.models()  # gRPC frees an ended call when the next one comes
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in call:
                pass
        assert ended.value.code() is grpc.StatusCode.CANCELLED


async def test_a_client_that_reads_in_time_gets_the_status(cluster: FakeCluster, card: ModelCard) -> None:
    async with open_router(cluster, card) as router, unread_call(router, cluster.model, card) as call:
        await abort(router)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in call:
                pass
        assert isinstance(from_rpc_error(ended.value), errors.Aborted)
        await eventually(lambda: not call_tasks())


async def test_a_last_response_that_stays_unread_ends_its_call(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is over by then, and gRPC writes the response after the handler has returned it."""
    shorter = CallAnswer.response

    def response(self: CallAnswer, events: Any, index: int = 0) -> router_pb2.GenerateResponse:
        found = shorter(self, events, index)
        if events[-1].HasField("finished"):
            found.events.add().delta.text = "x" * (1 << 20)
        return found

    monkeypatch.setattr(CallAnswer, "response", response)
    monkeypatch.setattr(serve, "WRITE_STALL_S", 0.5)
    async with (
        open_router(cluster, card) as router,
        grpc.aio.insecure_channel(router.host.endpoint, options=SMALL_WINDOW) as channel,
    ):
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        await stub.ListModels(router_pb2.ListModelsRequest())  # gRPC keeps the first call of a server
        short = router_pb2.Sampling(max_tokens=2)
        call = stub.Generate(router_pb2.GenerateRequest(prompt="y", sampling=short))
        await call.initial_metadata()
        await eventually(lambda: not router.manager.held and not cluster.held)
        assert call_tasks() == 1
        await eventually(lambda: not call_tasks())
        await stub.ListModels(router_pb2.ListModelsRequest())  # gRPC frees an ended call then
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            async for _ in call:
                pass
        assert ended.value.code() is grpc.StatusCode.CANCELLED


async def test_other_calls_of_the_connection_go_on(cluster: FakeCluster, card: ModelCard) -> None:
    async with open_router(cluster, card) as router:
        letters = [card.tokenizer.encode_text(letter)[0] for letter in LETTERS]
        script(cluster.model, [*letters * 200, card.stop_token_ids[0]])
        async with grpc.aio.insecure_channel(router.host.endpoint, options=SMALL_WINDOW) as channel:
            stub: Any = router_pb2_grpc.RouterServiceStub(channel)
            unread = stub.Generate(REQUEST)
            await eventually(lambda: any(run.sink.is_full for run in router.manager.running))
            await abort(router)
            router._grpc.generation.reset_s = 0.1
            hasten_writes(stall_s=WAIT_S, reset_s=0.1)
            short = router_pb2.GenerateRequest(prompt="y", sampling=router_pb2.Sampling(max_tokens=9))
            texts = [event.delta.text async for response in stub.Generate(short) for event in response.events]
            assert "".join(texts)
            await eventually(lambda: not call_tasks())
            del unread

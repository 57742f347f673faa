"""Every answer of the router's gRPC port names its request, refusals included; a client may choose the id."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.router.request.model_card import ModelCard
from services.router.request.validation import is_request_id
from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import router_pb2
from tests.router.conftest import HELLO, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys

GENERATE = router_pb2.GenerateRequest(prompt="x", sampling=router_pb2.Sampling(max_tokens=4))
# By method: the request, and one that is refused.
CALLS: dict[str, Any] = {
    "Generate": GENERATE,
    "Abort": router_pb2.AbortRequest(request_id="none"),
    "ListModels": router_pb2.ListModelsRequest(),
    "ListSessions": router_pb2.ListSessionsRequest(),
    "ListWorkers": router_pb2.ListWorkersRequest(),
}
CHOSEN = ("x-request-id", "req-chosen.1")
KEY = ("x-api-key", "key-a")


@asynccontextmanager
async def keyed(cluster: FakeCluster, card: ModelCard) -> AsyncIterator[grpc.aio.Channel]:
    keys = tenant_keys({"key-a": "a"})
    async with (
        open_router(cluster, card, keys=keys) as router,
        grpc.aio.insecure_channel(router.host.endpoint) as channel,
    ):
        yield channel


async def call(
    channel: grpc.aio.Channel, method: str, data: bytes, *metadata: tuple[str, str]
) -> tuple[str, str, errors.SlipstreamError | None]:
    """The request ids in the initial and in the trailing metadata, and the error."""
    path = f"/slipstream.v1.RouterService/{method}"
    begin: Any = channel.unary_stream(path)
    running = begin(data, metadata=metadata, timeout=60)
    error = None
    try:
        async for _ in running:
            pass
    except grpc.aio.AioRpcError as raised:
        error = from_rpc_error(raised)
    initial, trailing = dict(await running.initial_metadata()), dict(await running.trailing_metadata())
    return initial.get("x-request-id", ""), trailing.get("x-request-id", ""), error


@pytest.mark.parametrize("method", CALLS)
async def test_every_answer_has_a_request_id(cluster: FakeCluster, card: ModelCard, method: str) -> None:
    data = CALLS[method].SerializeToString()
    async with keyed(cluster, card) as channel:
        initial, first, error = await call(channel, method, data, KEY)
        _, second, _ = await call(channel, method, data, KEY)
        assert error is None and is_request_id(first) and first != second
        assert initial == (first if method == "Generate" else "")
        assert (await call(channel, method, data, KEY, CHOSEN))[1:] == (CHOSEN[1], None)
        for metadata, sent in (((), data), ((KEY,), b"\xff")):  # no key; no message of this method
            _, given, error = await call(channel, method, sent, *metadata)
            assert error is not None and is_request_id(given) and error.request_id == given
            _, given, error = await call(channel, method, sent, CHOSEN, *metadata)
            assert given == CHOSEN[1] and error is not None and error.request_id == given


async def test_the_id_in_the_message_goes_before_that_of_the_metadata(
    cluster: FakeCluster, card: ModelCard
) -> None:
    own = router_pb2.GenerateRequest(prompt="x", request_id="r-own")
    async with keyed(cluster, card) as channel:
        assert await call(channel, "Generate", own.SerializeToString(), KEY, CHOSEN) == (
            "r-own",
            "r-own",
            None,
        )


async def test_an_invalid_id_is_refused_by_name(cluster: FakeCluster, card: ModelCard) -> None:
    async with keyed(cluster, card) as channel:
        bad = ("x-request-id", "no spaces")
        _, given, error = await call(channel, "Generate", GENERATE.SerializeToString(), KEY, bad)
        assert isinstance(error, errors.InvalidArgument) and error.field == "request_id"
        assert is_request_id(given)


async def test_the_sdk_shows_the_id_of_an_answer_and_of_a_failure(client: AsyncClient) -> None:
    assert (await client.chat(HELLO, request_id="r-7")).request_id == "r-7"
    with pytest.raises(errors.InvalidArgument) as refused:
        await client.chat(HELLO, request_id="r-8", temperature=-1)
    assert refused.value.request_id == "r-8"

"""Long gRPC answers that are no streams, and that clients do not read, stay within their tenant's share."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from libs.common import api_bounds
from services.router.request.model_card import ModelCard
from slipstream import errors
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.router.conftest import WAIT_S, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.untrusted.test_unread_calls import SMALL_WINDOW
from tests.support.api_keys import tenant_keys

N_TOKENS = 300_000
METHOD = "/slipstream.v1.RouterService/Detokenize"


async def test_unread_answers_of_one_call_are_bounded_by_tenant(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of one answer is read as a stream, which leaves the answer unread."""
    monkeypatch.setattr(api_bounds, "MAX_TENANT_SENT_RESPONSE_BYTES", 5 * N_TOKENS // 2)
    (letter,) = card.tokenizer.encode_text("q")
    request = router_pb2.DetokenizeRequest(token_ids=[letter] * N_TOKENS)
    keys = tenant_keys({"key-a": "a", "key-b": "b"})
    async with (
        open_router(cluster, card, keys=keys) as router,
        grpc.aio.insecure_channel(router.host.endpoint, options=SMALL_WINDOW) as channel,
    ):
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        open_call: Any = channel.unary_stream(
            METHOD,
            request_serializer=router_pb2.DetokenizeRequest.SerializeToString,
            response_deserializer=router_pb2.DetokenizeResponse.FromString,
        )
        of_anna, of_bert = [(("x-api-key", key),) for key in ("key-a", "key-b")]
        unread = [open_call(request, metadata=of_anna, timeout=WAIT_S) for _ in range(2)]
        await eventually(lambda: router._grpc._sent.held_chars > 2 * N_TOKENS)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Detokenize(request, metadata=of_anna, timeout=WAIT_S)
        assert isinstance(from_rpc_error(refused.value), errors.Overloaded)
        short = router_pb2.DetokenizeRequest(token_ids=[letter])
        assert (await stub.Detokenize(short, metadata=of_anna, timeout=WAIT_S)).text == "q"
        assert len((await stub.Detokenize(request, metadata=of_bert, timeout=WAIT_S)).text) == N_TOKENS
        async for answer in unread[0]:
            assert answer.text == "q" * N_TOKENS
        unread[1].cancel()
        await eventually(lambda: not router._grpc._sent.held_chars)
        assert len((await stub.Detokenize(request, metadata=of_anna, timeout=WAIT_S)).text) == N_TOKENS

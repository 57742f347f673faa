"""The SDK against a real gRPC server that speaks the router's contract."""

from __future__ import annotations

import asyncio
import importlib
import os
from collections.abc import AsyncIterator, Awaitable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import grpc
import pytest

import slipstream
from slipstream import AsyncClient, Client, ModelPricing, ServedModel, errors
from slipstream.rpc.rpc_errors import to_status
from slipstream.rpc.tls import TlsFiles
from slipstream.v1 import common_pb2, router_pb2, router_pb2_grpc
from tests.support.network.goaway_peer import the_first_leaves
from tests.support.stubs.blocking_router import serving
from tests.support.stubs.partial_servicer import partial_servicer

PEMS = Path(__file__).parents[1] / "support" / "tls"

TOOL = {
    "type": "function",
    "function": {
        "name": "get_order",
        "description": "Look up.",
        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}},
    },
}


def _answer() -> list[router_pb2.GenerateEvent]:
    started = router_pb2.Started(request_id="r1", model="m", prompt_tokens=9)
    deltas = [router_pb2.Delta(text=text) for text in ("He", "llo")]
    for piece in ('{"id":', ' "A-1"}'):
        call = router_pb2.ToolCallDelta(
            index=0, id="functions.get_order:0", name="get_order", arguments=piece
        )
        deltas.append(router_pb2.Delta(tool_calls=[call]))
    cached = [common_pb2.CachedTokens(tier=common_pb2.CACHE_TIER_NVME, tokens=5)]
    usage = router_pb2.Usage(
        prompt_tokens=9, completion_tokens=4, cached_tokens=5, cached=cached, reasoning_tokens=3
    )
    usage.cost.CopyFrom(router_pb2.Cost(currency="USD", amount_pico=39_600_000))
    stats = router_pb2.RequestStats(prefill_worker="prefill-0", ttft_ms=12.5, attempts=1)
    finished = router_pb2.Finished(
        finish_reason=common_pb2.FINISH_REASON_TOOL_CALLS, usage=usage, stats=stats
    )
    return [
        router_pb2.GenerateEvent(started=started),
        *(router_pb2.GenerateEvent(delta=delta) for delta in deltas),
        router_pb2.GenerateEvent(finished=finished),
    ]


class Scripted(router_pb2_grpc.RouterServiceServicer):
    """Answers every Generate with one scripted stream and keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[router_pb2.GenerateRequest] = []
        self.metadata: dict[str, str] = {}
        self.cancelled = False

    def Generate(self, request: Any, context: Any) -> Iterator[router_pb2.GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        if request.model == "absent":
            context.abort_with_status(to_status(errors.NotFound("no model absent", field="model")))
        events = _answer()
        width = len(events) if request.model == "joined" else 1
        for first in range(0, len(events), width):
            yield router_pb2.GenerateResponse(events=events[first : first + width])

    def ListModels(self, request: Any, context: Any) -> router_pb2.ListModelsResponse:
        price = router_pb2.ModelPrice(
            currency="USD", input_pico=600_000, cached_input_pico=100_000, output_pico=3_000_000
        )
        named = router_pb2.Model(id="m", max_context_tokens=4096, created_unix_s=1.5, price=price)
        return router_pb2.ListModelsResponse(models=[named, router_pb2.Model(id="without-price")])

    def Abort(self, request: Any, context: Any) -> router_pb2.AbortResponse:
        self.cancelled = request.request_id == "r1"
        return router_pb2.AbortResponse()


@pytest.fixture
def served() -> Iterator[tuple[Scripted, str]]:
    servicer = partial_servicer(Scripted)
    with serving(servicer) as endpoint:
        yield servicer, endpoint


MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "Where is "}, {"type": "text", "text": "A-1?"}]}
]


def test_importing_the_sdk_keeps_grpcs_lines_out_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in ((None, "ERROR"), ("DEBUG", "DEBUG")):
        monkeypatch.setenv("GRPC_VERBOSITY", given or "")
        if given is None:
            monkeypatch.delenv("GRPC_VERBOSITY")
        importlib.reload(slipstream)
        assert os.environ["GRPC_VERBOSITY"] == expected


def test_a_whole_reply(served: tuple[Scripted, str]) -> None:
    servicer, endpoint = served
    with Client(endpoint, api_key="k") as client:
        reply = client.chat(MESSAGES, tools=[TOOL], session="s1", temperature=0.0, seed=-3, stop="END")
        assert client.models() == ["m", "without-price"]
        client.abort("r1")
    assert servicer.cancelled
    assert (reply.text, reply.finish_reason, reply.request_id) == ("Hello", "tool_calls", "r1")
    assert reply.as_message()["tool_calls"][0]["function"] == {
        "name": "get_order",
        "arguments": '{"id": "A-1"}',
    }
    assert reply.usage is not None and reply.usage.cached_by_tier == {"nvme": 5}
    assert reply.usage.reasoning_tokens == 3
    assert (str(reply.usage.cost), reply.usage.currency) == ("0.000039600000", "USD")
    assert reply.stats is not None and reply.stats.ttft_ms == 12.5
    sent = servicer.requests[0]
    assert "".join(part.text for part in sent.chat.messages[0].content) == "Where is A-1?"
    assert (sent.sampling.HasField("temperature"), sent.sampling.seed, list(sent.stop)) == (True, -3, ["END"])
    assert not sent.sampling.HasField("top_p")
    assert servicer.metadata["x-session-affinity"] == "s1"
    assert servicer.metadata["authorization"] == "Bearer k"
    with Client(endpoint) as client:
        for session, sent_as in (
            ("gespräch", "gespräch".encode()),
            ("a\n", b"a\n"),
            ("\ud800", b"\xed\xa0\x80"),
        ):
            client.chat([{"role": "user", "content": "hi"}], session=session)
            assert "x-session-affinity" not in servicer.metadata
            assert servicer.metadata["x-session-affinity-bin"] == sent_as  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("model", ["apart", "joined"])
def test_streaming_yields_the_pieces_and_then_the_whole(served: tuple[Scripted, str], model: str) -> None:
    with Client(served[1]) as client:
        stream = client.stream_chat(MESSAGES, model=model)
        assert [event.text for event in stream if event.text] == ["He", "llo"]
        assert stream.reply.tool_calls[0].arguments == '{"id": "A-1"}'


async def test_the_async_client_says_the_same(served: tuple[Scripted, str]) -> None:
    async with AsyncClient(served[1]) as client:
        stream = client.stream_chat(MESSAGES)
        texts = [event.text async for event in stream]
        assert "".join(texts) == "Hello" and stream.reply.finish_reason == "tool_calls"
        assert (await client.complete("Once")).text == "Hello"
        assert await client.models() == ["m", "without-price"]
        with pytest.raises(errors.NotFound) as caught:
            await client.chat(MESSAGES, model="absent")
        assert caught.value.field == "model"


async def test_models_have_their_context_and_their_prices(served: tuple[Scripted, str]) -> None:
    price = ModelPricing("USD", Decimal("6e-7"), Decimal("1e-7"), Decimal("3e-6"))
    expected = [ServedModel("m", 4096, 1.5, price), ServedModel("without-price", 0, 0.0, None)]
    with Client(served[1]) as client:
        assert client.list_models() == expected
    async with AsyncClient(served[1]) as client:
        assert await client.list_models() == expected


def test_an_api_key_with_a_line_end_is_refused_by_name(served: tuple[Scripted, str]) -> None:
    with (
        Client(served[1], api_key="k\n") as client,
        pytest.raises(errors.InvalidArgument, match=r"^api_key: "),
    ):
        client.models()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("key", ["client.key", "missing.key"])
def test_tls_files_that_cannot_be_used_are_refused(kind: type[Client | AsyncClient], key: str) -> None:
    files = TlsFiles(PEMS / "ca.pem", PEMS / "peer.pem", PEMS / key)
    with pytest.raises(errors.InvalidArgument, match=r"^tls: "):
        kind("127.0.0.1:1", tls=files)


def test_errors_are_typed(served: tuple[Scripted, str]) -> None:
    with Client(served[1]) as client, pytest.raises(errors.NotFound, match="no model absent"):
        client.chat(MESSAGES, model="absent")
    with Client("127.0.0.1:1") as client, pytest.raises(errors.Unavailable):
        client.chat(MESSAGES, timeout_s=60)


async def test_the_client_survives_a_router_that_leaves_at_the_first_contact(
    served: tuple[Scripted, str],
) -> None:
    """Another process has its port, or its place behind one address; gRPC does not ask it by itself."""
    servicer, target = served

    def ask(endpoint: str, what: str) -> object:
        with Client(endpoint) as client:
            return _asked(client, what)

    for what, answered in (("models", ["m", "without-price"]), ("abort", None), ("chat", "Hello")):
        async with the_first_leaves(target) as endpoint:
            assert await asyncio.to_thread(ask, endpoint, what) == answered
        async with the_first_leaves(target) as endpoint, AsyncClient(endpoint) as client:
            asked = _asked(client, what)
            assert isinstance(asked, Awaitable)
            reply = await asked
            assert (reply.text if what == "chat" else reply) == answered
    assert servicer.cancelled and len(servicer.requests) == 2


def _asked(client: Any, what: str) -> Any:
    if what == "models":
        return client.models(timeout_s=60)
    if what == "abort":
        return client.abort("r1", timeout_s=60)
    asked = client.chat(MESSAGES, timeout_s=60)
    return asked if isinstance(asked, Awaitable) else asked.text


async def test_leaving_a_stream_cancels_the_request() -> None:
    ended: list[bool] = []

    class Endless(router_pb2_grpc.RouterServiceServicer):
        async def Generate(self, request: Any, context: Any) -> AsyncIterator[router_pb2.GenerateResponse]:
            try:
                while True:
                    event = router_pb2.GenerateEvent(delta=router_pb2.Delta(text="x"))
                    yield router_pb2.GenerateResponse(events=[event])
                    await asyncio.sleep(0.01)
            finally:
                ended.append(True)

    server = grpc.aio.server()
    router_pb2_grpc.add_RouterServiceServicer_to_server(partial_servicer(Endless), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}") as client:
        async for event in client.stream_chat(MESSAGES):
            assert event.text == "x"
            break
        async with asyncio.timeout(60):
            while not ended:
                await asyncio.sleep(0.01)
    await server.stop(0)

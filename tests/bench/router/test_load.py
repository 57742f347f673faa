"""The load generator's log of an answer agrees with gRPC's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from bench.router.load import GENERATE, GrpcTarget
from slipstream.errors import Overloaded
from slipstream.requests import chat_request
from slipstream.rpc.rpc_errors import to_status
from slipstream.v1 import router_pb2

Response = router_pb2.GenerateResponse
Event = router_pb2.GenerateEvent
STARTED = Event(started=router_pb2.Started(request_id="r", prompt_tokens=3))
FINISHED = Event(finished=router_pb2.Finished(usage=router_pb2.Usage(completion_tokens=3)))
TEXTS = [Event(delta=router_pb2.Delta(text=text)) for text in ("a", "bc", "d" * 40_000)]


def joined(*events: Event) -> Response:
    return Response(events=events)


# Each with how the call ends.
ANSWERS: dict[str, tuple[Sequence[Response], str]] = {
    "apart": ([joined(event) for event in (STARTED, *TEXTS, FINISHED)], "ok"),
    "joined": ([joined(STARTED, TEXTS[0]), joined(TEXTS[1]), joined(TEXTS[2], FINISHED)], "ok"),
    "one message": ([joined(STARTED, *TEXTS, FINISHED)], "ok"),
    "late": ([joined(STARTED), joined(*TEXTS), joined(FINISHED)], "ok"),
    "refused": ([], "error"),
    "breaks off": ([joined(STARTED, TEXTS[0])], "error"),
    "no end": ([joined(STARTED, TEXTS[0]), joined(TEXTS[1])], "ok"),
    "nothing": ([], "ok"),
}


@pytest.fixture
async def endpoint() -> AsyncIterator[str]:
    """A server that returns the answer whose name is the prompt."""

    async def generate(data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        messages, end = ANSWERS[router_pb2.GenerateRequest.FromString(data).chat.messages[0].content[0].text]
        for message in messages:
            yield message.SerializeToString()
        if end == "error":
            await context.abort_with_status(to_status(Overloaded("busy")))

    server = grpc.aio.server()
    service, name = GENERATE[1:].split("/")
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        name: grpc.unary_stream_rpc_method_handler(generate)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.mark.parametrize("name", ANSWERS)
async def test_text_tokens_arrivals_and_failures_are_those_of_the_librarys_client(
    endpoint: str, name: str
) -> None:
    target = GrpcTarget(endpoint)
    prompt = [{"role": "user", "content": name}]
    messages, failed = [], False
    try:
        async with grpc.aio.insecure_channel(endpoint) as channel:
            generate: Any = channel.unary_stream(GENERATE)
            async for data in generate(chat_request(prompt, {}).SerializeToString()):
                messages.append(Response.FromString(data))
    except grpc.aio.AioRpcError:
        failed = True
    log = await target.stream(prompt, max_tokens=3, want_text=True)
    await target.close()
    events = [list(message.events) for message in messages]
    flat = [event for several in events for event in several]
    assert log.text == "".join(event.delta.text for event in flat)
    assert len(log.arrivals) == sum(any(e.HasField("delta") for e in several) for several in events)
    assert sorted(log.arrivals) == log.arrivals
    whole = not failed and bool(flat) and flat[-1].HasField("finished")
    assert bool(log.error) is not whole
    assert log.completion_tokens == (3 if whole else 0)


async def test_a_connection_that_the_server_closed_opens_again(endpoint: str) -> None:
    target = GrpcTarget(endpoint)
    prompt = [{"role": "user", "content": next(iter(ANSWERS))}]
    await target.stream(prompt, max_tokens=3)
    (connection,) = target._connections
    assert connection.transport is not None
    connection.transport.abort()
    await target.stream(prompt, max_tokens=3)
    assert list(target._connections) != [connection]
    await target.close()

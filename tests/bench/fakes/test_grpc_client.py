"""The load generator's gRPC client against gRPC's own server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from bench.fakes.grpc_client import GrpcConnection

WAIT_S = 60.0
METHOD = "/bench.Echo/Parts"


async def parts(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
    """Returns the metadata, then the request in parts; an error for an empty request."""
    if not request:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
    said = dict(context.invocation_metadata() or ())
    yield str(said["x-said"]).encode()
    for at in range(0, len(request), 100_000):
        yield request[at : at + 100_000]


@pytest.fixture
async def connection() -> AsyncIterator[GrpcConnection]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 1 << 24)])
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Parts": grpc.unary_stream_rpc_method_handler(parts)
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    loop = asyncio.get_running_loop()
    _, opened = await loop.create_connection(lambda: GrpcConnection("localhost"), "127.0.0.1", port)
    yield opened
    opened.close()
    await server.stop(None)


async def ask(connection: GrpcConnection, request: bytes, said: str = "a") -> list[bytes]:
    got: list[bytes] = []
    async with asyncio.timeout(WAIT_S):
        await connection.call(METHOD, request, got.append, metadata=(("x-said", said),))
    return got


async def test_calls_at_once_of_any_size_each_get_their_own(connection: GrpcConnection) -> None:
    """Requests beyond the server's windows, an answer of many frames, headers of more than 127 bytes."""
    sizes = (1, 100, 16_379, 16_380, 70_000, 1_000_000, 3_000_000)
    requests = [bytes([index]) * size for index, size in enumerate(sizes)]
    answers = await asyncio.gather(*(ask(connection, r, "s" * len(r[:300])) for r in requests))
    for request, (said, *answer) in zip(requests, answers, strict=True):
        assert said == b"s" * len(request[:300])
        assert b"".join(answer) == request


async def test_a_refused_call_has_no_message_and_others_go_on(connection: GrpcConnection) -> None:
    refused, served = await asyncio.gather(ask(connection, b""), ask(connection, b"x"))
    assert refused == []
    assert served == [b"a", b"x"]


async def test_a_closed_connection_raises(connection: GrpcConnection) -> None:
    connection.close()
    with pytest.raises(ConnectionError):
        await ask(connection, b"x")

"""The fake workers' gRPC server against gRPC's own client."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from bench.fakes.http2_server import GrpcServerConnection
from bench.fakes.rpc_server import RpcServer
from libs.common.rpc.serve import READINESS, ServiceHost
from slipstream.errors import Overloaded
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

WAIT_S = 60.0
BIG_BYTES = 3_000_000


class Echo:
    """Returns its requests, in each of gRPC's four forms; `running` counts handlers that have not ended."""

    def __init__(self) -> None:
        self.running = 0

    async def one(self, request: bytes, context: Any) -> bytes:
        if request == b"fail":
            context.set_trailing_metadata((("why", "asked to"),))
            await context.abort(grpc.StatusCode.NOT_FOUND, "100 % not here: ä")
        if request == b"break":
            raise RuntimeError("broken")
        if request == b"metadata":
            pairs = [pair for pair in context.invocation_metadata() if pair[0][:2] == "x-"]
            return repr(
                sorted(pairs, key=lambda pair: pair[0])
            ).encode()  # keeps the order of a name's values
        if request == b"time":
            return repr(context.time_remaining()).encode()
        return request

    async def many(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        self.running += 1
        try:
            while True:
                yield request
        finally:
            self.running -= 1

    async def parts(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for at in range(0, len(request), 700_000):
            yield request[at : at + 700_000]

    async def written(self, request: bytes, context: Any) -> None:
        await context.write(request)
        await context.write(request)

    async def joined(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return b"".join([request async for request in requests])

    async def both(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.running += 1
        try:
            async for request in requests:
                if request == b"enough":
                    return
                yield request
        finally:
            self.running -= 1

    async def forever(self, request: bytes, context: Any) -> bytes:
        self.running += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.running -= 1
        return b""


@asynccontextmanager
async def serving(*options: tuple[str, int]) -> AsyncIterator[tuple[Echo, grpc.aio.Channel, RpcServer]]:
    echo, server = Echo(), RpcServer()
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "One": grpc.unary_unary_rpc_method_handler(echo.one),
        "Forever": grpc.unary_unary_rpc_method_handler(echo.forever),
        "Many": grpc.unary_stream_rpc_method_handler(echo.many),
        "Parts": grpc.unary_stream_rpc_method_handler(echo.parts),
        "Written": grpc.unary_stream_rpc_method_handler(echo.written),
        "Joined": grpc.stream_unary_rpc_method_handler(echo.joined),
        "Both": grpc.stream_stream_rpc_method_handler(echo.both),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    limits = (("grpc.max_receive_message_length", -1), ("grpc.enable_retries", 0))
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[*limits, *options])
    try:
        async with asyncio.timeout(WAIT_S):
            yield echo, channel, server
            await channel.close()
            await until_none_run(echo)
    finally:
        await channel.close()
        await server.stop(None)


async def until_none_run(echo: Echo) -> None:
    while echo.running:
        await asyncio.sleep(0.001)


async def until_one_runs(echo: Echo) -> None:
    while not echo.running:
        await asyncio.sleep(0.001)


def unary(channel: grpc.aio.Channel, method: str) -> Any:
    return channel.unary_unary(f"/bench.Echo/{method}")


def stream(channel: grpc.aio.Channel, method: str) -> Any:
    return channel.unary_stream(f"/bench.Echo/{method}")


def both(channel: grpc.aio.Channel) -> Any:
    return channel.stream_stream("/bench.Echo/Both")


async def test_each_form_of_call_has_its_answer() -> None:
    async with serving() as (_, channel, _server):
        assert await unary(channel, "One")(b"a") == b"a"
        assert await unary(channel, "One")(b"") == b""
        assert [m async for m in stream(channel, "Written")(b"b")] == [b"b", b"b"]
        joined: Any = channel.stream_unary("/bench.Echo/Joined")
        assert await joined(iter([b"c", b"", b"d"])) == b"cd"
        assert await joined(iter([])) == b""
        call = both(channel)()
        for request in (b"e", b"", b"f"):
            await call.write(request)
            assert await call.read() == request
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_no_answer_waits_for_the_acknowledgement_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without TCP_NODELAY a small response waits up to 40 ms on Linux."""
    made: list[asyncio.BaseTransport] = []
    inner = GrpcServerConnection.connection_made

    def connection_made(connection: GrpcServerConnection, transport: asyncio.BaseTransport) -> None:
        inner(connection, transport)
        made.append(transport)

    monkeypatch.setattr(GrpcServerConnection, "connection_made", connection_made)
    async with serving() as (_, channel, _server):
        assert await unary(channel, "One")(b"a") == b"a"
        bound = made[0].get_extra_info("socket")
        assert bound.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_many_calls_at_once_on_one_connection_each_have_their_own() -> None:
    async with serving() as (_, channel, _server):
        requests = [b"%d" % index * (1 + 997 * index) for index in range(100)]
        assert await asyncio.gather(*(unary(channel, "One")(request) for request in requests)) == requests


# The client's default windows, and the smallest that gRPC allows.
SMALL = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))


@pytest.mark.parametrize("options", [(), SMALL], ids=["its own windows", "small windows"])
async def test_messages_larger_than_frames_and_windows_arrive_both_ways(
    options: tuple[tuple[str, int], ...],
) -> None:
    """Small messages of other calls do not wait for large ones."""
    async with serving(*options) as (_, channel, _server):
        big = bytes(range(256)) * (BIG_BYTES // 256)
        call = both(channel)()
        for size in (16_379, 16_380, 65_530, 65_531, 1_000_000, len(big)):
            await call.write(big[:size])
            small = unary(channel, "One")(b"small")
            assert await call.read() == big[:size]
            assert await small == b"small"
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        parts = [part async for part in stream(channel, "Parts")(big)]
        assert b"".join(parts) == big
        assert len(parts) > 1


async def test_a_client_that_does_not_read_holds_its_handler_and_no_other() -> None:
    async with serving() as (echo, channel, _server):
        call = stream(channel, "Many")(b"m" * 100_000)
        assert await call.read() == b"m" * 100_000
        assert await unary(channel, "One")(b"a") == b"a"
        call.cancel()
        await until_none_run(echo)


async def test_a_status_arrives_with_its_details_and_metadata() -> None:
    async with serving() as (_, channel, _server):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary(channel, "One")(b"fail")
        error = caught.value
        assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "100 % not here: ä")
        assert ("why", "asked to") in tuple(error.trailing_metadata())


async def test_a_handler_that_breaks_is_unknown_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (_, channel, _server):
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary(channel, "One")(b"break")
        assert caught.value.code() is grpc.StatusCode.UNKNOWN
        assert "broken" in caplog.text
        assert await unary(channel, "One")(b"a") == b"a"


@pytest.mark.parametrize("method", ["/bench.Echo/None", "/bench.None/One"])
async def test_a_method_without_a_handler_is_unimplemented(method: str) -> None:
    async with serving() as (_, channel, _server):
        call: Any = channel.unary_unary(method)
        streams: Any = channel.stream_stream(method)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"a")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await streams().code() is grpc.StatusCode.UNIMPLEMENTED


async def test_metadata_arrives_as_it_was_sent() -> None:
    async with serving() as (_, channel, _server):
        for _ in range(2):  # the second time by the header table
            metadata = (("x-data-bin", bytes(range(256))), ("x-text", "a " * 200 + "a"), ("x-text", "b"))
            answer = await unary(channel, "One")(b"metadata", metadata=metadata)
            assert answer.decode() == repr(list(metadata))


async def test_a_deadline_is_known_and_ends_the_handler() -> None:
    async with serving() as (echo, channel, _server):
        assert await unary(channel, "One")(b"time") == b"None"
        left_s = float(await unary(channel, "One")(b"time", timeout=3600))
        assert 0 < left_s < 3700  # the client rounds it up
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary(channel, "Forever")(b"", timeout=0.2)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until_none_run(echo)


async def test_a_cancel_amid_a_stream_ends_its_handler_and_no_other() -> None:
    async with serving() as (echo, channel, _server):
        other, call = both(channel)(), both(channel)()
        for one in (other, call):
            await one.write(b"a")
            assert await one.read() == b"a"
        assert echo.running == 2
        call.cancel()
        while echo.running == 2:
            await asyncio.sleep(0.001)
        await other.write(b"b")
        assert await other.read() == b"b"
        other.cancel()
        await until_none_run(echo)


async def test_a_handler_that_ends_before_its_client_ends_the_call() -> None:
    async with serving() as (_, channel, _server):
        call = both(channel)()
        await call.write(b"enough")
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        assert await unary(channel, "One")(b"a") == b"a"


async def test_a_stop_ends_every_call_as_unavailable() -> None:
    async with serving() as (echo, channel, server):
        open_call, waiting = both(channel)(), unary(channel, "Forever")(b"")
        await open_call.write(b"a")
        assert await open_call.read() == b"a"
        while echo.running < 2:
            await asyncio.sleep(0.001)
        await server.stop(0.5)
        assert await open_call.code() is grpc.StatusCode.UNAVAILABLE
        assert await waiting.code() is grpc.StatusCode.UNAVAILABLE
        assert not await server.wait_for_termination(timeout=WAIT_S)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary(channel, "One")(b"a")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_taken_port_raises() -> None:
    server = RpcServer()
    port = server.add_insecure_port("127.0.0.1:0")
    with pytest.raises(RuntimeError, match=str(port)):
        RpcServer().add_insecure_port(f"127.0.0.1:{port}")
    await server.stop(None)


class Refusing(decode_pb2_grpc.DecodeServiceServicer, prefill_pb2_grpc.PrefillServiceServicer):
    """Raises typed errors from each kind of handler; all other calls are unimplemented."""

    async def AbortDecode(self, request: decode_pb2.AbortDecodeRequest, context: Any) -> Any:
        raise Overloaded("busy", retry_after_ms=7)

    async def Decode(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in request_iterator:
            yield decode_pb2.DecodeResponse(step=request.frame_interval_ms)
            raise Overloaded("full", retry_after_ms=8)


async def test_a_service_host_on_it_serves_health_reflection_and_typed_errors() -> None:
    host = ServiceHost("127.0.0.1:0", make_server=RpcServer)
    servicer = Refusing()  # type: ignore[abstract]
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, host.server)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, host.server)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(
        worker_pb2_grpc.WorkerServiceServicer(),  # type: ignore[abstract]
        host.server,
    )
    await host.start(["slipstream.v1.DecodeService"])
    async with dial(host.endpoint) as channel, asyncio.timeout(WAIT_S):
        await assert_health_is_served(channel, host)
        await assert_services_are_listed(channel)
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.AbortDecode(decode_pb2.AbortDecodeRequest())
        error = from_rpc_error(caught.value)
        assert isinstance(error, Overloaded) and error.retry_after_ms == 7
        call = stub.Decode()
        await call.write(decode_pb2.DecodeRequest(frame_interval_ms=5))
        assert (await call.read()).step == 5
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        error = from_rpc_error(caught.value)
        assert isinstance(error, Overloaded) and error.retry_after_ms == 8
        omitted: Any = prefill_pb2_grpc.PrefillServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await omitted.RenewHandoff(prefill_pb2.RenewHandoffRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        status: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status.GetStatus(worker_pb2.GetStatusRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await host.stop(grace_s=1.0)


async def assert_health_is_served(channel: grpc.aio.Channel, host: ServiceHost) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=READINESS)
    watch = stub.Watch(request)
    kinds = health_pb2.HealthCheckResponse
    assert (await watch.read()).status == kinds.NOT_SERVING
    await host.set_ready(True)
    assert (await watch.read()).status == kinds.SERVING
    assert (await stub.Check(request)).status == kinds.SERVING
    watch.cancel()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="absent"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def assert_services_are_listed(channel: grpc.aio.Channel) -> None:
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await call.read()
    assert "slipstream.v1.DecodeService" in [s.name for s in answer.list_services_response.service]
    call.cancel()

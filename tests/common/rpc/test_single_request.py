"""The message of a unary call: read after the call was accepted, refused by name, never waited for long."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from libs.common.cluster import worker_service
from libs.common.cluster.worker_record import Role
from libs.common.cluster.worker_service import WorkerIdentity, WorkerService
from libs.common.rpc import serve
from libs.common.rpc.call_room import CallRoom
from libs.common.rpc.serve import ServiceHost
from libs.common.rpc.single_request import MalformedRequests, TimedReads
from libs.common.service_bounds import GRPC_PUBLIC_CALLS, GRPC_PUBLIC_REQUEST_BYTES
from slipstream.errors import Aborted, InvalidArgument, Overloaded, Unauthenticated
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import from_rpc_error
from slipstream.v1 import worker_pb2, worker_pb2_grpc
from tests.support.stubs.idle_process import IdleProcess

WAIT_S = 60.0


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a key."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        if ("key", "k") not in tuple(handler_call_details.invocation_metadata):
            raise Unauthenticated("a key is needed")
        return await continuation(handler_call_details)


async def echo(request: bytes, context: Any) -> bytes:
    return request


async def twice(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield request
    yield request


HANDLERS: dict[str, Any] = {
    "Echo": grpc.unary_unary_rpc_method_handler(echo),
    "Twice": grpc.unary_stream_rpc_method_handler(twice),
}


@contextlib.asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[grpc.aio.Channel]:
    host = ServiceHost("127.0.0.1:0", **options)
    host.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Test", HANDLERS),))
    await host.start([])
    async with dial(host.endpoint) as channel, asyncio.timeout(2 * WAIT_S):
        yield channel
    await host.stop(grace_s=0)


async def end_of(call: Any) -> Exception:
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    raise AssertionError("the call succeeded")


@pytest.mark.parametrize("method", HANDLERS)
async def test_a_refused_call_is_answered_while_its_message_is_still_to_come(method: str) -> None:
    async with serving(interceptors=[KeyInterceptor()]) as channel:
        call: Any = channel.stream_stream(f"/t.Test/{method}")(timeout=WAIT_S)
        assert isinstance(await end_of(call), Unauthenticated)  # nothing was sent
        kept: Any = channel.unary_stream(f"/t.Test/{method}")
        assert await kept(b"x", metadata=(("key", "k"),), timeout=WAIT_S).read() == b"x"


@pytest.mark.parametrize("method", HANDLERS)
async def test_a_call_without_a_message_is_refused(method: str) -> None:
    async with serving() as channel:
        call: Any = channel.stream_stream(f"/t.Test/{method}")(timeout=WAIT_S)
        await call.done_writing()
        error = await end_of(call)
        assert isinstance(error, InvalidArgument) and error.field == "request"


async def test_further_messages_are_ignored_as_by_a_server_of_grpc() -> None:
    """And a client that leaves its side open is answered, too."""
    plain = grpc.aio.server()
    plain.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Test", HANDLERS),))
    port = plain.add_insecure_port("127.0.0.1:0")
    await plain.start()
    async with serving() as channel, dial(f"127.0.0.1:{port}") as plain_channel:
        for each in (channel, plain_channel):
            both: Any = iter([b"first", b"second"])
            assert await each.stream_unary("/t.Test/Echo")(both, timeout=WAIT_S) == b"first"
            left_open: Any = each.stream_stream("/t.Test/Echo")(timeout=WAIT_S)
            await left_open.write(b"first")
            assert await left_open.read() == b"first"
    await plain.stop(0)


async def test_a_message_that_does_not_come_is_not_waited_for() -> None:
    async with serving(read=TimedReads(timeout_s=0.1).read) as channel:
        call: Any = channel.stream_stream("/t.Test/Echo")(timeout=WAIT_S)
        error = await end_of(call)
        assert isinstance(error, InvalidArgument) and "must arrive within" in error.message


async def test_health_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "GRPC_PUBLIC_CALLS", 2)
    async with serving() as channel:
        watch: Any = channel.unary_stream("/grpc.health.v1.Health/Watch")
        request = health_pb2.HealthCheckRequest().SerializeToString()
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        await check(request, timeout=WAIT_S)  # gRPC keeps the first call of a server
        calls = []
        for _ in range(3):
            calls.append(watch(request, timeout=WAIT_S))
            await calls[-1].read()
        assert await check(request, timeout=WAIT_S)  # watchers take nothing from probes
        assert isinstance(await end_of(calls[0]), Aborted)  # the oldest made room for the newest
        assert not calls[1].done() and not calls[2].done()


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_call_without_a_key_keeps_no_long_message(method: str) -> None:
    request = health_pb2.HealthCheckRequest(service="x" * GRPC_PUBLIC_REQUEST_BYTES)
    async with serving() as channel:
        call: Any = channel.unary_stream(f"/grpc.health.v1.Health/{method}")
        error = await end_of(call(request.SerializeToString(), timeout=WAIT_S))
        assert isinstance(error, InvalidArgument) and "must have at most" in error.message


async def test_a_call_without_a_key_is_waited_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "GRPC_PUBLIC_READ_S", 0.1)
    async with serving() as channel:
        call: Any = channel.stream_stream("/grpc.health.v1.Health/Check")(timeout=WAIT_S)
        error = await end_of(call)
        assert isinstance(error, InvalidArgument) and "must arrive within 0.1 s" in error.message


async def test_calls_without_messages_keep_no_probe_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One connection begins many probes and never sends their messages."""
    monkeypatch.setattr(serve, "GRPC_PUBLIC_READ_S", 10 * WAIT_S)
    monkeypatch.setattr(serve, "GRPC_PUBLIC_ARRIVING", 4)
    request = health_pb2.HealthCheckRequest().SerializeToString()
    async with serving() as channel:
        check: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        await check(request, timeout=WAIT_S)
        silent: list[Any] = [
            channel.stream_stream("/grpc.health.v1.Health/Check")(timeout=WAIT_S)
            for _ in range(GRPC_PUBLIC_CALLS + 8)
        ]
        await asyncio.gather(*[call.initial_metadata() for call in silent[:8]], return_exceptions=True)
        for _ in range(5):
            assert await check(request, timeout=WAIT_S)


def test_a_full_room_ends_the_oldest_call_of_the_connection_with_the_most() -> None:
    room, ended = CallRoom(3), list[str]()
    with contextlib.ExitStack() as calls:
        for name in ("a1", "b1", "b2", "a2", "c1", "c2"):
            calls.enter_context(room.entered(name[0], functools.partial(ended.append, name)))
            assert room.running <= 3
        assert ended == ["b1", "a1", "b2"]
    assert room.running == 0


async def test_load_streams_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_service, "LOAD_WATCHERS", 1)
    identity = WorkerIdentity(Role.PREFILL, "prefill-0")
    service = WorkerService(identity, IdleProcess())
    host = ServiceHost("127.0.0.1:0")
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, host.server)
    await host.start([])
    async with dial(host.endpoint) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        first = stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=WAIT_S)
        await first.read()
        second = stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=WAIT_S)
        assert isinstance(await end_of(second), Overloaded)
    await host.stop(grace_s=0)


def test_malformed_messages_are_one_line_a_second(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    malformed = MalformedRequests(clock=lambda: now_s)
    parse = malformed.checked(worker_pb2.WatchLoadRequest.FromString, "/x/Y")
    assert parse is not None
    with caplog.at_level(logging.WARNING):
        for step in range(10):
            now_s = step / 5
            with pytest.raises(InvalidArgument):
                parse(b"\xff")
    assert malformed.count == 10
    assert [(r.getMessage(), r.exc_info) for r in caplog.records] == [
        ("1 malformed messages, the last to /x/Y", None),
        ("5 malformed messages, the last to /x/Y", None),
    ]

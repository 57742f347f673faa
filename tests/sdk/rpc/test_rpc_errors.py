"""Every error of the tree keeps its type, message and fields across a real gRPC call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from libs.common.rpc.serve import LIVENESS, READINESS, ServiceHost
from slipstream import errors
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import from_failure, from_rpc_error, to_failure
from slipstream.v1 import router_pb2, router_pb2_grpc
from tests.support.stubs.partial_servicer import partial_servicer


def _make(kind: type[errors.SlipstreamError]) -> errors.SlipstreamError:
    if issubclass(kind, errors.InvalidArgument):
        return kind("messages[1].role", "must be one of: user")
    if issubclass(kind, errors.NotFound):
        return kind("no such model", field="model")
    if issubclass(kind, errors.Overloaded):
        return kind("busy", retry_after_ms=250)
    return kind("it broke")


KINDS = [kind for kind in errors.error_types().values() if kind is not errors.SlipstreamError]


def _same(a: errors.SlipstreamError, b: errors.SlipstreamError) -> bool:
    return type(a) is type(b) and a.message == b.message and vars(a) == vars(b)


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_survives_a_failure_message(kind: type[errors.SlipstreamError]) -> None:
    error = _make(kind)
    assert _same(from_failure(to_failure(error)), error)


class Raising(router_pb2_grpc.RouterServiceServicer):
    error: Exception = RuntimeError("secret detail")

    async def ListModels(self, request, context):  # type: ignore[no-untyped-def]
        raise self.error

    async def Generate(self, request, context) -> AsyncIterator[router_pb2.GenerateResponse]:  # type: ignore[no-untyped-def]
        yield router_pb2.GenerateResponse()
        raise self.error


@pytest.fixture
async def served() -> AsyncIterator[tuple[Raising, router_pb2_grpc.RouterServiceStub]]:
    host = ServiceHost("127.0.0.1:0")
    servicer = partial_servicer(Raising)
    router_pb2_grpc.add_RouterServiceServicer_to_server(servicer, host.server)
    await host.start(["slipstream.v1.RouterService"])
    async with dial(host.endpoint) as channel:
        yield servicer, router_pb2_grpc.RouterServiceStub(channel)
    await host.stop(grace_s=0)


@pytest.mark.parametrize("kind", KINDS)
async def test_an_error_survives_unary_and_streaming_calls(kind, served) -> None:  # type: ignore[no-untyped-def]
    servicer, stub = served
    servicer.error = _make(kind)
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await stub.ListModels(router_pb2.ListModelsRequest(), timeout=60)
    assert _same(from_rpc_error(unary.value), servicer.error)
    with pytest.raises(grpc.aio.AioRpcError) as stream:
        async for _ in stub.Generate(router_pb2.GenerateRequest(), timeout=60):
            pass
    assert _same(from_rpc_error(stream.value), servicer.error)


@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError])
async def test_a_defect_leaves_as_internal_without_its_details_and_is_logged(
    kind: type[Exception], served: tuple[Raising, Any], caplog: pytest.LogCaptureFixture
) -> None:
    servicer, stub = served
    servicer.error = kind("secret detail")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ListModels(router_pb2.ListModelsRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [servicer.error]


async def test_liveness_and_readiness_differ() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    host = ServiceHost("127.0.0.1:0")
    await host.start([])
    async with dial(host.endpoint) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def status(name: str) -> int:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=60)
            return int(answer.status)

        serving, not_serving = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        assert (await status(LIVENESS), await status(READINESS)) == (serving, not_serving)
        await host.set_ready(True)
        assert (await status(LIVENESS), await status(READINESS), await status("")) == (serving,) * 3
    await host.stop(grace_s=0)


async def test_a_taken_port_is_a_typed_error() -> None:
    host = ServiceHost("127.0.0.1:0")
    with pytest.raises(errors.Unavailable, match="cannot listen on"):
        ServiceHost(host.endpoint)
    await host.start([])
    await host.stop(grace_s=0)


async def test_a_call_that_a_servicer_leaves_out_is_unimplemented(
    served: tuple[Raising, Any],
) -> None:
    _, stub = served
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ListWorkers(router_pb2.ListWorkersRequest(), timeout=60)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_lists_the_service() -> None:
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    host = ServiceHost("127.0.0.1:0")
    router_pb2_grpc.add_RouterServiceServicer_to_server(partial_servicer(Raising), host.server)
    await host.start(["slipstream.v1.RouterService"])

    def names() -> list[str]:
        with grpc.insecure_channel(host.endpoint) as channel:
            return list(ProtoReflectionDescriptorDatabase(channel).get_services())

    assert "slipstream.v1.RouterService" in await asyncio.to_thread(names)
    await host.stop(grace_s=0)

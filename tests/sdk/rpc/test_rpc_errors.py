"""Every error of the tree keeps its type, message and fields across a real gRPC call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from libs.common.rpc.serve import LIVENESS, READINESS, ServiceHost
from slipstream import errors
from slipstream.enum_names import FAILURE_CODES
from slipstream.rpc.dial import dial
from slipstream.rpc.rpc_errors import (
    from_failure,
    from_rpc_error,
    names_pause,
    to_failure,
    to_status,
)
from slipstream.v1 import common_pb2, router_pb2, router_pb2_grpc
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


def test_failure_codes_have_the_names_and_numbers_of_grpc() -> None:
    codes: Any = {code.name: code.value[0] for code in grpc.StatusCode if code is not grpc.StatusCode.OK}
    assert {name: FAILURE_CODES.value(name) for name in codes} == codes
    assert {FAILURE_CODES.name(number): number for number in codes.values()} == codes
    assert common_pb2.FailureCode.values() == [0, *sorted(codes.values())]


@pytest.mark.parametrize("code", [common_pb2.FAILURE_CODE_UNSPECIFIED, 99, -1])
def test_a_failure_with_an_unknown_code_is_a_defect_unless_its_reason_is_known(code: int) -> None:
    # The codes of a later contract arrive as numbers without a name.
    sent = common_pb2.Failure(code=code, message="it broke").SerializeToString()  # type: ignore[arg-type]
    failure = common_pb2.Failure.FromString(sent)
    assert failure.code == code and type(from_failure(failure)) is errors.Internal
    failure.reason = "LaterError"
    assert type(from_failure(failure)) is errors.Internal
    failure.reason = "Draining"
    assert type(from_failure(failure)) is errors.Draining


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_with_an_unknown_reason_is_the_nearest_class_of_its_code(
    kind: type[errors.SlipstreamError],
) -> None:
    failure = to_failure(_make(kind))
    failure.reason = "LaterError"
    assert from_failure(failure).code == kind.code
    assert issubclass(kind, type(from_failure(failure))) or kind is errors.AnswerMismatch


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


_DETAILS = "grpc-status-details-bin"
_LONG = duration_pb2.Duration(seconds=(1 << 63) - 1)


def _packed(*details: Any, code: int = 8) -> bytes:
    status = status_pb2.Status(code=code, message="said")
    for detail in details:
        status.details.add().Pack(detail)
    packed: bytes = status.SerializeToString()
    return packed


_FALSE = any_pb2.Any(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff")
HOSTILE_DETAILS = {
    "no message": b"\xff\xff\xff",
    "another code": _packed(code=3),
    "another text": status_pb2.Status(code=8, message="other").SerializeToString(),
    "no detail": status_pb2.Status(code=8, message="said", details=[_FALSE]).SerializeToString(),
    "a long pause": _packed(error_details_pb2.RetryInfo(retry_delay=_LONG)),
    "a pause in the past": _packed(
        error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=-5))
    ),
}


@pytest.mark.parametrize("details", HOSTILE_DETAILS.values(), ids=HOSTILE_DETAILS)
async def test_false_details_of_a_peer_leave_a_typed_error_that_can_be_passed_on(details: bytes) -> None:
    async def refuse(request: bytes, context: Any) -> None:
        context.set_trailing_metadata(((_DETAILS, details),))
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "said")

    class Refusing(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(refuse)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Refusing(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with dial(f"127.0.0.1:{port}") as channel:
        stub: router_pb2_grpc.RouterServiceAsyncStub = router_pb2_grpc.RouterServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.ListModels(router_pb2.ListModelsRequest(), timeout=30)
    await server.stop(None)
    error = from_rpc_error(failed.value)
    assert isinstance(error, errors.Overloaded) and error.message == "said"
    assert isinstance(names_pause(failed.value), bool)
    assert to_status(error).details == "said"
    assert to_failure(error).retry_after_ms == error.retry_after_ms

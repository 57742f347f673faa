"""What the span of a call says of how the call ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from opentelemetry.trace import StatusCode

from libs.common.rpc.serve import ServiceHost
from slipstream import errors
from slipstream.rpc.dial import dial
from tests.support.processes.process_checks import eventually
from tests.support.recorded_spans import PARENT, KeptSpans, kept_spans, said

WAIT_S = 100.0
METADATA = (("traceparent", PARENT),)


@pytest.fixture
def kept() -> Iterator[KeptSpans]:
    with kept_spans() as kept:
        yield kept


async def one(request: bytes, context: Any) -> bytes:
    raise errors.NotFound(f"no {request.decode()}")


async def many(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield b"some"
    if request == b"defect":
        raise ValueError("a defect")
    if request == b"endless":
        await asyncio.sleep(3600)
    if request != b"all":
        raise errors.NotFound(f"no {request.decode()}")


HANDLERS: dict[str, Any] = {
    "One": grpc.unary_unary_rpc_method_handler(one),
    "Many": grpc.unary_stream_rpc_method_handler(many),
}


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    host = ServiceHost("127.0.0.1:0")
    host.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.Test", HANDLERS),))
    await host.start([])
    async with dial(host.endpoint) as channel, asyncio.timeout(2 * WAIT_S):
        yield channel
    await host.stop(grace_s=0.1)


@pytest.mark.parametrize(
    ("method", "asked", "said_of_it", "described"),
    [
        ("One", b"such", {"code": "NOT_FOUND"}, ""),
        ("Many", b"such", {"code": "NOT_FOUND"}, ""),
        ("Many", b"defect", {}, "a defect"),
    ],
)
async def test_a_call_that_raises_has_failed(
    kept: KeptSpans,
    channel: grpc.aio.Channel,
    method: str,
    asked: bytes,
    said_of_it: dict[str, str],
    described: str,
) -> None:
    path = f"/t.Test/{method}"
    call: Any = channel.unary_unary(path) if method == "One" else channel.unary_stream(path)
    answer: Any = call(asked, metadata=METADATA, timeout=WAIT_S)
    if method == "Many":
        assert await answer.read() == b"some"
    with pytest.raises(grpc.aio.AioRpcError):
        await (answer if method == "One" else answer.read())
    await eventually(lambda: kept.names)
    span = kept.one(path[1:])
    expected = (StatusCode.ERROR, described) if described else (StatusCode.UNSET, None)
    assert (span.status.status_code, span.status.description) == expected
    assert said_of_it.items() <= said(span).items()


def _many(channel: grpc.aio.Channel, asked: bytes) -> Any:
    method: Any = channel.unary_stream("/t.Test/Many")
    return method(asked, metadata=METADATA, timeout=WAIT_S)


@pytest.mark.parametrize("asked", [b"all", b"endless"])
async def test_a_stream_that_is_read_to_its_end_or_left_has_not(
    kept: KeptSpans, channel: grpc.aio.Channel, asked: bytes
) -> None:
    call = _many(channel, asked)
    async for piece in call:
        assert piece == b"some"
        if asked == b"endless":
            break
    call.cancel()
    await eventually(lambda: kept.names)
    assert kept.one("t.Test/Many").status.status_code is StatusCode.UNSET

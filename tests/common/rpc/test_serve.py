"""Half-open clients of a served host: others are served meanwhile, and nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.common.rpc import serve
from libs.common.rpc.serve import LIVENESS, ServiceHost
from slipstream.rpc.dial import dial

WAIT_S = 100.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, HEADERS, PING = 4, 1, 6
END_HEADERS, ACK = 4, 1


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """One HTTP/2 frame (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload


def literal(name: bytes, value: bytes) -> bytes:
    """One header without compression (RFC 7541, 6.2.2)."""
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


CHECK = frame(
    HEADERS,
    END_HEADERS,
    1,
    literal(b":method", b"POST")
    + literal(b":scheme", b"http")
    + literal(b":path", b"/grpc.health.v1.Health/Check")
    + literal(b":authority", b"localhost")
    + literal(b"te", b"trailers")
    + literal(b"content-type", b"application/grpc"),
)


class Raw:
    """A TCP connection that sends given bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def until_closed(self, *, ack_settings: bool = False, answer_pings: bool = False) -> None:
        """Read until the host closes; sends nothing."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                header = await self.reader.readexactly(9)
                payload = await self.reader.readexactly(int.from_bytes(header[:3], "big"))
                if answer_pings and header[3] == PING and not header[4] & ACK:
                    self.writer.write(frame(PING, ACK, 0, payload))
                if ack_settings and header[3] == SETTINGS and not header[4] & ACK:
                    self.writer.write(frame(SETTINGS, ACK, 0))


@contextlib.asynccontextmanager
async def raw(host: ServiceHost) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", host.port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def serving(*options: tuple[str, int]) -> AsyncIterator[ServiceHost]:
    host = ServiceHost("127.0.0.1:0", options=options)
    await host.start([])
    try:
        yield host
    finally:
        async with asyncio.timeout(WAIT_S):  # a half-open client does not keep the host either
            await host.stop(grace_s=0.1)


async def alive(host: ServiceHost) -> bool:
    request = health_pb2.HealthCheckRequest(service=LIVENESS)
    async with dial(host.endpoint) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_S, wait_for_ready=True)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize(
    "sent", [b"", PREFACE[:9], PREFACE], ids=["nothing", "half a preface", "no settings"]
)
async def test_a_connection_that_shakes_no_hands_is_closed_and_others_are_served(
    monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(serve, "GRPC_HANDSHAKE_S", 2.0)  # others need less on a slow machine too
    async with serving() as host, raw(host) as silent, asyncio.timeout(WAIT_S):
        silent.writer.write(sent)
        assert await alive(host)
        await silent.until_closed()
        assert await alive(host)


FAST_PINGS = (("grpc.keepalive_time_ms", 1000),)  # the time for the answer is the host's own


@pytest.mark.parametrize("sent", [b"", CHECK], ids=["no call", "a call without its message"])
async def test_a_client_that_vanished_is_pinged_and_closed_and_others_are_served(sent: bytes) -> None:
    async with serving(*FAST_PINGS) as host, raw(host) as gone, asyncio.timeout(WAIT_S):
        gone.writer.write(PREFACE + frame(SETTINGS, 0, 0) + sent)
        assert await alive(host)
        await gone.until_closed(ack_settings=True)
        assert await alive(host)


async def test_a_call_without_a_message_whose_client_answers_pings_reaches_no_handler() -> None:
    """gRPC keeps such a call, see the docstring of `libs/common/rpc/serve.py`; it ends with the host."""
    async with asyncio.timeout(2 * WAIT_S), contextlib.AsyncExitStack() as clients:
        async with serving() as host:
            waiting = await clients.enter_async_context(raw(host))
            waiting.writer.write(PREFACE + frame(SETTINGS, 0, 0) + CHECK)
            closed = asyncio.create_task(waiting.until_closed(ack_settings=True, answer_pings=True))
            for _ in range(5):
                assert await alive(host)
            assert not closed.done()
        await closed
    with pytest.raises(ConnectionRefusedError):  # nothing of the host listens any more
        await asyncio.open_connection("127.0.0.1", host.port)

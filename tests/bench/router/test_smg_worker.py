"""The fake worker of SMG's protocol: HTTP/2 as a gRPC client sees it, and the pace of all our fakes."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bench.fakes.http2_frames import MessageReader, frame
from bench.fakes.http2_server import GrpcServerConnection
from bench.router.grpc_client import GrpcConnection
from bench.router.pace import Pace
from bench.router.smg_worker import Asked, PacedScheduler

METHOD = "/any.Service/Generate"
ANSWER = (7, 8, 9)
PROMPT = "request-1 4 5"  # its id, tokens of the prompt, tokens wanted
EXPECTED = [f"{token} {nth}" for nth, token in enumerate((7, 8, 9, 7, 8), 1)] + ["end [7, 8, 9, 7, 8]"]


class TextCodec:
    """Messages a test reads."""

    def __init__(self) -> None:
        self.unary: Mapping[str, bytes] = {"Check": b"serving"}

    def asked(self, data: bytes) -> Asked:
        request_id, prompt_tokens, max_tokens = data.decode().split()
        return Asked(request_id, int(prompt_tokens), int(max_tokens))

    def chunk(self, asked: Asked, token: int, completion_tokens: int) -> bytes:
        return f"{token} {completion_tokens}".encode()

    def complete(self, asked: Asked, tokens: Sequence[int]) -> bytes:
        return f"end {list(tokens)}".encode()


@asynccontextmanager
async def serving(
    pace: Pace, tier: str = "decode"
) -> AsyncIterator[tuple[PacedScheduler, Callable[..., Any], asyncio.Server]]:
    """The scheduler, and a call of it by the load generator's own client."""
    scheduler = PacedScheduler(pace, TextCodec(), ANSWER, tier=tier)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: GrpcServerConnection(scheduler), "127.0.0.1", 0)
    stepping = asyncio.create_task(scheduler.run())
    port = server.sockets[0].getsockname()[1]
    _, client = await loop.create_connection(lambda: GrpcConnection(f"127.0.0.1:{port}"), "127.0.0.1", port)

    async def call(request: str, method: str = METHOD, times: list[float] | None = None) -> list[str]:
        messages: list[str] = []

        def take(data: bytes) -> None:
            messages.append(data.decode())
            if times is not None:
                times.append(time.monotonic())

        async with asyncio.timeout(60):
            await client.call(method, request.encode(), take, metadata=())
        return messages

    try:
        yield scheduler, call, server
    finally:
        client.close()
        stepping.cancel()
        server.close()


async def test_a_sequence_is_whole_and_leaves_nothing() -> None:
    async with serving(Pace(0.0, 0.0, 0.0)) as (scheduler, call, _):
        assert await call(PROMPT) == EXPECTED
        assert await call("request-2 4 1") == ["7 1", "end [7]"]
        many = await asyncio.gather(*(call(f"request-{index} 4 5") for index in range(50)))
        assert many == [EXPECTED] * 50
        assert scheduler.held == 0


async def test_prefill_makes_one_token() -> None:
    async with serving(Pace(0.0, 0.0, 0.0), tier="prefill") as (scheduler, call, _):
        assert await call(PROMPT) == ["7 1", "end [7]"]
        assert scheduler.held == 0


async def test_other_methods_have_their_answers_or_none() -> None:
    async with serving(Pace(0.0, 0.0, 0.0)) as (_, call, _server):
        assert await call("", "/grpc.health.v1.Health/Check") == ["serving"]
        assert await call("", "/any.Service/SubscribeKvEvents") == []


async def test_tokens_come_no_sooner_than_the_pace() -> None:
    pace = Pace(prefill_ms=30.0, prefill_us_per_token=5_000.0, step_ms=30.0)
    async with serving(pace) as (_, call, _server):
        times: list[float] = []
        began_s = time.monotonic()
        assert await call(PROMPT, times=times) == EXPECTED
        assert times[0] - began_s >= 0.049  # 30 ms and four tokens of 5
        # Steps begin with the request. The second token takes the second step, or on a machine that stalls
        # the first one, late.
        assert times[4] - began_s >= 0.119


async def test_a_client_that_goes_takes_its_sequences_along() -> None:
    async with serving(Pace(3_600_000.0, 0.0, 0.0)) as (scheduler, call, _):
        waiting = asyncio.create_task(call(PROMPT))
        async with asyncio.timeout(60):
            while not scheduler.held:
                await asyncio.sleep(0.001)
    with pytest.raises(ConnectionResetError):
        await waiting
    async with asyncio.timeout(60):
        while scheduler.held:
            await asyncio.sleep(0.001)


class Wire(asyncio.Transport):
    """What the server wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def take(self) -> list[tuple[int, int, bytes]]:
        """Frames since the last call: kind, flags, payload."""
        frames, data, self.written = [], self.written, b""
        while data:
            size = int.from_bytes(data[:3], "big")
            frames.append((data[3], data[4], data[9 : 9 + size]))
            data = data[9 + size :]
        return frames


async def test_a_closed_window_holds_tokens_back_until_it_opens() -> None:
    scheduler = PacedScheduler(Pace(0.0, 0.0, 0.0), TextCodec(), ANSWER, tier="decode")
    stepping = asyncio.create_task(scheduler.run())
    connection, wire = GrpcServerConnection(scheduler), Wire()
    connection.connection_made(wire)
    wire.take()
    request = b"\x00" + struct.pack(">I", len(PROMPT)) + PROMPT.encode()
    path = b"\x04" + bytes([len(METHOD)]) + METHOD.encode()  # a literal, its name in the static table
    opening = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, struct.pack(">HI", 4, 10))
    for byte in opening + frame(1, 4, 1, path) + frame(0, 1, 1, request):  # in pieces as small as can be
        connection.data_received(bytes([byte]))
    settings, headers, first = wire.take()
    assert (settings[:2], headers[0], first) == ((4, 1), 1, (0, 0, b"\x00\x00\x00\x00\x037 1"))
    for _ in range(10):
        await asyncio.sleep(0)
    second = wire.take()
    assert second == [(0, 0, b"\x00\x00")]  # two bytes of ten were left
    connection.data_received(frame(8, 0, 1, struct.pack(">I", 1000)))
    async with asyncio.timeout(60):
        while scheduler.held:
            await asyncio.sleep(0)
    rest = b"".join(payload for kind, _, payload in [*second, *wire.take()] if kind == 0)
    assert [message.decode() for message in MessageReader().whole(rest)] == EXPECTED[1:]
    stepping.cancel()

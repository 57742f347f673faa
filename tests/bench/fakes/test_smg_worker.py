"""The fake worker of SMG's protocol: its calls, its pace, and flow control."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived
from h2.settings import SettingCodes, Settings

from bench.fakes.grpc_client import GrpcConnection
from bench.fakes.http2 import MessageReader, prefixed
from bench.fakes.http2_server import GrpcServerConnection
from bench.fakes.pace import Pace
from bench.fakes.smg_worker import Asked, PacedScheduler

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


async def test_a_disconnect_ends_the_clients_sequences() -> None:
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
    """Keeps what the server writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)


async def test_a_closed_window_holds_tokens_back_until_it_opens() -> None:
    scheduler = PacedScheduler(Pace(0.0, 0.0, 0.0), TextCodec(), ANSWER, tier="decode")
    stepping = asyncio.create_task(scheduler.run())
    connection, wire = GrpcServerConnection(scheduler), Wire()
    connection.connection_made(wire)
    client = H2Connection(H2Configuration(client_side=True))
    received = b""

    def exchange() -> None:
        nonlocal received
        for byte in client.data_to_send():  # in pieces as small as can be
            connection.data_received(bytes([byte]))
        written, wire.written = wire.written, b""
        events = client.receive_data(written)
        received += b"".join(event.data for event in events if isinstance(event, DataReceived))

    client.local_settings = Settings(client=True, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: 10})
    client.initiate_connection()
    headers = [(":method", "POST"), (":scheme", "http"), (":path", METHOD), (":authority", "a")]
    client.send_headers(1, headers)
    client.send_data(1, prefixed(PROMPT.encode()), end_stream=True)
    exchange()
    for _ in range(10):
        await asyncio.sleep(0)
    exchange()
    assert received == prefixed(b"7 1") + b"\x00\x00"  # ten bytes
    client.increment_flow_control_window(1000, 1)
    exchange()
    async with asyncio.timeout(60):
        while scheduler.held:
            await asyncio.sleep(0)
    exchange()
    assert [message.decode() for message in MessageReader().complete(received)] == EXPECTED
    stepping.cancel()

"""Clients on real sockets that read an event stream slower than it comes, or stop.

What waits for them is bounded, joined and parked. Then they are cut off, and other streams go on. The same
over gRPC is in ../rpc/test_slow_readers.py.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from libs.common.service_bounds import MAX_WAITING_BYTES
from services.router.execution.running_request import RunningRequest
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from tests.router.conftest import WAIT_S, eventually, lose_patience, open_router, script
from tests.router.support.fake_cluster import FakeCluster

TOKENS = 1500
_BUFFER_BYTES = 1 << 12  # of the kernel, at both ends, so that what is unread is soon felt
# Log probabilities make the answer longer than every buffer on the way.
BODY = {
    "messages": [{"role": "user", "content": "Where is my order?"}],
    "stream": True,
    "logprobs": True,
    "top_logprobs": 20,
}


class RawClient:
    """A socket that reads exactly as much as a test asks for."""

    def __init__(self, key: str = "none") -> None:
        self._key = key
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self.socket.setblocking(False)
        self.received = bytearray()  # of many MB in small pieces: bytes would be copied for each

    async def post(self, endpoint: str, body: dict[str, Any], *, path: str = "/v1/chat/completions") -> None:
        await self.send(endpoint, f"POST {path}", json.dumps(body).encode())

    async def send(self, endpoint: str, what: str, data: bytes = b"") -> None:
        """Send a request; `what` is its method and path."""
        host, _, port = endpoint.rpartition(":")
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.socket, (host, int(port)))
        head = f"{what} HTTP/1.1\r\nHost: {endpoint}\r\nContent-Length: {len(data)}\r\n"
        head += f"Content-Type: application/json\r\nx-api-key: {self._key}\r\n"
        await loop.sock_sendall(self.socket, head.encode() + b"Connection: close\r\n\r\n" + data)

    async def read(self, n_bytes: int) -> bytes:
        """At most so many; empty at the end."""
        piece = await asyncio.get_running_loop().sock_recv(self.socket, n_bytes)
        self.received += piece
        return piece

    async def read_all(self) -> None:
        while await self.read(1 << 16):
            pass

    def body(self) -> bytes:
        """The body of the chunked answer."""
        received, chunks = bytes(self.received), []
        at = received.index(b"\r\n\r\n") + 4
        while at < len(received):
            end = received.index(b"\r\n", at)
            start, n_bytes = end + 2, int(received[at:end], 16)
            chunks.append(received[start : start + n_bytes])
            at = start + n_bytes + 2
        return b"".join(chunks)

    def events(self) -> list[dict[str, Any]]:
        """The events of a chat completion, without [DONE]."""
        lines = [line.removeprefix("data: ") for line in self.body().decode().split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line) for line in lines[:-1]]


@asynccontextmanager
async def slow_client(
    cluster: FakeCluster, card: ModelCard, **options: float
) -> AsyncIterator[tuple[RouterServer, RawClient, RunningRequest]]:
    """A stream of TOKENS tokens that fills every buffer, because its client reads nothing yet."""
    letters = [card.tokenizer.encode_text(letter)[0] for letter in "abcdefgh"]
    answer = [letters[index % 8] for index in range(TOKENS)]
    script(cluster.model, [*answer, card.stop_token_ids[0]])
    async with open_router(cluster, card, **options) as router:
        router.ports.http.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        client = RawClient()
        await client.post(router.http_endpoint, BODY)
        await eventually(lambda: router.manager.held == 1, timeout_s=WAIT_S)
        (run,) = router.manager.running
        yield router, client, run
        client.socket.close()


async def others_are_served(router: RouterServer) -> None:
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
        short = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        async with http.post("/v1/chat/completions", json=short) as answer:
            assert answer.status == 200
            assert (await answer.json())["usage"]["completion_tokens"] == 4


async def test_a_reader_that_stops_and_goes_on_gets_everything_joined(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with slow_client(cluster, card) as (router, client, run):
        await eventually(lambda: run.sink.waiting_bytes >= MAX_WAITING_BYTES, timeout_s=WAIT_S)
        await others_are_served(router)
        # It stands still: its worker's tokens wait in the router, and nothing of the answer is lost.
        assert router.manager.held == 1
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, run.sink.waiting_bytes)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        async with asyncio.timeout(WAIT_S):
            await client.read_all()
        watching.cancel()
        events = client.events()
        deltas = [event["choices"][0] for event in events if event["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in deltas)
        assert text == "".join("abcdefgh"[index % 8] for index in range(TOKENS))
        logprobs = [entry for choice in deltas for entry in (choice.get("logprobs") or {}).get("content", ())]
        assert len(logprobs) == TOKENS
        assert len(events) < TOKENS
        assert deltas[-1]["finish_reason"] == "stop"
        # One joined batch may stand above the bound, never a second one.
        assert most < 3 * MAX_WAITING_BYTES
        await eventually(lambda: not router.manager.held and not cluster.held, timeout_s=WAIT_S)


async def test_a_reader_of_a_byte_at_a_time_is_cut_off(cluster: FakeCluster, card: ModelCard) -> None:
    """A client that reads a few bytes where thousands wait is cut off like one that is gone."""
    async with slow_client(cluster, card, write_stall_s=WAIT_S) as (router, client, run):

        async def trickle() -> None:
            while await client.read(1):
                await asyncio.sleep(0.02)

        reading = asyncio.create_task(trickle())
        await others_are_served(router)
        lose_patience(router)
        await eventually(lambda: not router.manager.held and not cluster.held, timeout_s=WAIT_S)
        assert run.sink.waiting_bytes < 3 * MAX_WAITING_BYTES
        counters = router.counters.snapshot()
        assert counters["slipstream_requests_aborted_total"] == 1
        assert counters.get("slipstream_requests_failed_total", 0) == 0
        # The client learns of it: its connection is reset once it has read what the kernel had.
        reading.cancel()
        with_error: BaseException | None = None
        try:
            async with asyncio.timeout(WAIT_S):
                await client.read_all()
        except ConnectionResetError as error:
            with_error = error
        assert with_error is not None or b"[DONE]" not in client.received
        await others_are_served(router)

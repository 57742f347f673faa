"""Clients that are slow, half-open or gone: each is dealt with alone, in bounded time and memory."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import pytest

from services.router.api.openai.response import ResponseWriter
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import bounds
from tests.router.conftest import WAIT_S, eventually, lose_patience, open_router, script
from tests.router.support.fake_cluster import FakeCluster

HELLO = [{"role": "user", "content": "Where is my order?"}]


def post(body: bytes, *, length: int | None = None) -> bytes:
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


def json_session(router: RouterServer) -> aiohttp.ClientSession:
    """A client that sends bytes as JSON."""
    kind = {"Content-Type": "application/json"}
    return aiohttp.ClientSession(f"http://{router.http_endpoint}", headers=kind)


async def connect(router: RouterServer) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = router.http_endpoint.rpartition(":")
    return await asyncio.open_connection(host, int(port))


async def test_a_header_that_never_ends_is_cut_off(cluster: FakeCluster, card: ModelCard) -> None:
    async with open_router(cluster, card, idle_connection_s=0.3) as router:
        for beginning in (b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Slow: "):
            reader, writer = await connect(router)
            writer.write(beginning)
            async with asyncio.timeout(60):
                assert await reader.read() == b""
            writer.close()


async def test_a_body_that_never_ends_is_refused_by_name(cluster: FakeCluster, card: ModelCard) -> None:
    async with open_router(cluster, card, body_read_s=0.2) as router:
        reader, writer = await connect(router)
        writer.write(post(b'{"messages": [', length=1000))
        async with asyncio.timeout(60):
            answer = await reader.readuntil(b"\r\n\r\n")
            body = json.loads(await reader.readuntil(b"}}"))
        assert answer.startswith(b"HTTP/1.1 400")
        assert body["error"]["param"] == "body"
        assert body["error"]["message"] == f"body: {bounds.BODY_TIME.words}"
        writer.close()


async def test_an_oversized_body_is_refused_unread(router: RouterServer) -> None:
    reader, writer = await connect(router)
    writer.write(post(b"", length=bounds.MAX_BODY_BYTES + 1))
    async with asyncio.timeout(60):
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


async def test_a_body_of_unknown_size_is_bounded_too(router: RouterServer) -> None:
    async def endless() -> object:
        for _ in range(200):
            yield b"x" * (1 << 16)

    async with (
        json_session(router) as http,
        http.post("/v1/chat/completions", data=endless()) as answer,
    ):
        assert answer.status == 413
        assert (await answer.json())["error"]["message"] == f"body: {bounds.BODY.words}"


async def test_a_compressed_bomb_is_bounded_too(router: RouterServer) -> None:
    import gzip

    bomb = gzip.compress(b" " * (bounds.MAX_BODY_BYTES * 4))
    assert len(bomb) < 100_000
    async with (
        json_session(router) as http,
        http.post("/v1/chat/completions", data=bomb, headers={"Content-Encoding": "gzip"}) as answer,
    ):
        assert answer.status == 413


async def test_a_body_that_is_not_what_its_encoding_says_is_the_clients_fault(router: RouterServer) -> None:
    async with (
        json_session(router) as http,
        http.post("/v1/chat/completions", data=b"plain", headers={"Content-Encoding": "gzip"}) as answer,
    ):
        assert answer.status == 400
        assert (await answer.json())["error"]["message"] == f"body: {bounds.BODY_FORMAT.words}"


async def test_a_failure_after_the_status_is_in_the_stream_and_the_connection_goes_on(
    router: RouterServer, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bytes:
        raise RuntimeError("a secret")

    monkeypatch.setattr(ResponseWriter, "closing", broken)
    reader, writer = await connect(router)
    writer.write(post(json.dumps({"messages": HELLO, "stream": True, "max_tokens": 4}).encode()))
    async with asyncio.timeout(60):
        answer = await reader.readuntil(b"\r\n0\r\n\r\n")
        assert answer.count(b"HTTP/1.1") == 1
        assert b"internal error" in answer
        assert not any(secret in answer for secret in (b"a secret", b"[DONE]"))
        writer.write(b"GET /healthz/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()
    await eventually(lambda: not cluster.held and not router.manager.held)


async def test_a_client_that_never_reads_is_cut_off_and_others_go_on(
    cluster: FakeCluster, card: ModelCard
) -> None:
    letters = [card.tokenizer.encode_text(letter)[0] for letter in "abcdefgh"]
    script(cluster.model, [*letters * 230, card.stop_token_ids[0]])
    async with open_router(cluster, card, write_stall_s=WAIT_S) as router:
        host, _, port = router.http_endpoint.rpartition(":")
        # Small kernel buffers at both ends, so that what is unread is soon felt.
        router.ports.http.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        deaf.setblocking(False)
        await asyncio.get_running_loop().sock_connect(deaf, (host, int(port)))
        body = {"messages": HELLO, "stream": True, "logprobs": True, "top_logprobs": 20}
        await asyncio.get_running_loop().sock_sendall(deaf, post(json.dumps(body).encode()))
        await eventually(lambda: router.manager.held == 1)
        async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as http:
            short = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            async with http.post("/v1/chat/completions", json=short) as answer:
                assert answer.status == 200
        assert router.manager.held == 1
        lose_patience(router)
        await eventually(lambda: not router.manager.held and not cluster.held)
        assert router.counters.snapshot()["slipstream_requests_aborted_total"] == 1
        deaf.close()


async def test_a_client_that_disconnects_ends_its_request(router: RouterServer, cluster: FakeCluster) -> None:
    for stream in (True, False):
        for worker in cluster.decodes:
            worker.gate.clear()
        _, writer = await connect(router)
        writer.write(post(json.dumps({"messages": HELLO, "stream": stream}).encode()))
        await eventually(lambda: any(worker.held for worker in cluster.decodes))
        writer.transport.abort()
        await eventually(lambda: not cluster.held and not router.manager.held)


async def test_garbage_is_refused_and_the_next_client_served(router: RouterServer) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"\r\n\r\n\x00\xff" * 50):
        reader, writer = await connect(router)
        writer.write(garbage)
        writer.write_eof()
        async with asyncio.timeout(60):
            await reader.read()
        writer.close()
    async with (
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
        http.get("/healthz/ready") as answer,
    ):
        assert answer.status == 200


async def test_a_client_that_expects_100_continue_gets_it(router: RouterServer) -> None:
    body = json.dumps({"messages": HELLO}).encode()
    head, _, _ = post(body).partition(b"\r\n\r\n")
    reader, writer = await connect(router)
    writer.write(head + b"\r\nExpect: 100-continue\r\n\r\n")
    async with asyncio.timeout(60):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    writer.close()


@pytest.mark.parametrize("expectation", [b"a miracle", b"100-conti\x9enue"], ids=["text", "no text"])
@pytest.mark.parametrize("path", ["POST /v1/chat/completions", "HEAD /v1/batches", "GET /nowhere"])
async def test_an_expectation_of_something_else_is_refused(
    router: RouterServer, path: str, expectation: bytes
) -> None:
    reader, writer = await connect(router)
    writer.write(path.encode() + b" HTTP/1.1\r\nHost: localhost\r\nExpect: " + expectation + b"\r\n\r\n")
    async with asyncio.timeout(60):
        assert (await reader.readline()).startswith(b"HTTP/1.1 417")
        answer = await reader.read()
    if not path.startswith("HEAD"):
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "expectation_failed"
    writer.close()

"""The router ends bodies of small chunks early, and reads any number of ordinary chunks."""

from __future__ import annotations

import asyncio
import json

import pytest

from libs.common.http.chunked_body import READ_BYTES
from libs.common.http.connection import HttpConnection
from services.router.server import RouterServer
from tests.router.conftest import HELLO, WAIT_S, eventually

HEAD = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n"
CHAT = HEAD % (b"/v1/chat/completions", b"application/json")
ONE_BYTE = b"1\r\n \r\n"


async def answer_to(router: RouterServer, *parts: bytes) -> bytes:
    """What the router says before it closes or has answered."""
    host, _, port = router.http_endpoint.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    said = b""
    async with asyncio.timeout(WAIT_S):
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
            said = await reader.read(1 << 16)
        except ConnectionError:
            pass
        finally:
            writer.close()
    return said


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[begin : begin + size] for begin in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [64, 100, 4096])
async def test_a_long_body_in_ordinary_chunks_is_read(router: RouterServer, size: int) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 1}).encode() + b" " * (2 << 20)
    assert (await answer_to(router, CHAT + chunked(body, size))).startswith(b"HTTP/1.1 200")


async def test_a_short_body_in_chunks_of_a_byte_is_read(router: RouterServer) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 1}).encode() + b" " * 5000
    assert (await answer_to(router, CHAT + chunked(body, 1))).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "head",
    [
        CHAT,
        HEAD % (b"/v1/files", b"multipart/form-data; boundary=b") + chunked(b"--b\r\n", 5)[:-5],
        CHAT.replace(b"Host", b"Authorization: Bearer none\r\nHost"),
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2 + CHAT,
    ],
)
async def test_a_body_in_chunks_of_a_byte_ends_early(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """asyncio's own 256 KiB are 43,000 chunks of a byte: a tenth of a second of the event loop."""
    taken: list[int] = []
    receive = HttpConnection.data_received

    def note(self: HttpConnection, data: bytes) -> None:
        taken.append(len(data))
        receive(self, data)

    monkeypatch.setattr(HttpConnection, "data_received", note)
    await answer_to(router, head, *[ONE_BYTE * 1024] * 128)
    assert max(taken) <= READ_BYTES
    assert sum(taken) < 8 * READ_BYTES < 128 * 1024 * len(ONE_BYTE)
    await eventually(lambda: not router.manager.held)

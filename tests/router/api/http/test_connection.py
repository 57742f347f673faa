"""Malformed HTTP at a real router process: how it is answered, counted and logged."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from libs.common.http.connection import MalformedMessages
from libs.common.telemetry.counters import Counters
from services.router.request.model_card import ModelCard
from slipstream.rpc.tls import TlsFiles
from tests.router.conftest import open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel

ROOT = Path(__file__).resolve().parents[4]
PEMS = ROOT / "tests" / "support" / "tls"
TLS = TlsFiles(PEMS / "ca.pem", PEMS / "peer.pem", PEMS / "peer.key")
KEY = b"sk-supersecret-123"
PROMPT = b"my-secret-prompt"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
# Each holds the key or the prompt at a place where a parser's message would repeat it.
MALFORMED = {
    "control character": HEAD + b"Authorization: Bearer " + KEY + b"\x01\r\n\r\n",
    "space before the colon": HEAD + b"Authorization : Bearer " + KEY + b"\r\n\r\n",
    "bare CR": HEAD + b"X: a\rAuthorization: Bearer " + KEY + b"\r\n\r\n",
    "bare CR for the whole message": HEAD.replace(b"\r\n", b"\r") + b"\r" + PROMPT,
    "long line": HEAD + b"Authorization: Bearer " + KEY * 600 + b"\r\n\r\n",
    "no number": HEAD + b"Content-Length: " + KEY + b"\r\n\r\n",
    "chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + PROMPT + b"\r\n",
    "h2c": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + KEY,
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00" + KEY,
    "method": KEY + b" / HTTP/1.1\r\n\r\n",
    "target": b"GET " + KEY + b" HTTP/9.9\r\n\r\n",
}
# Well formed, refused by a handler, and holding a secret too.
REFUSED = [
    HEAD + b"Authorization: Bearer " + KEY + b"\r\nContent-Length: 3\r\n\r\n{]}",
    HEAD + b'Content-Length: 37\r\n\r\n{"messages": "my-secret-prompt     "}',
    b"GET /" + KEY + b" HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + KEY + b"\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: " + KEY + b"\r\nOrigin: https://" + KEY + b"\r\n\r\n",
    HEAD + b"Content-Encoding: gzip\r\nContent-Length: 16\r\n\r\n" + PROMPT,
    HEAD + b"x-request-id: " + KEY + b" !\r\nContent-Length: 2\r\n\r\n{}",
]


class RouterProcess:
    """A router without workers, and all that it wrote."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.written = b""
        self.port = self.admin_port = 0

    async def send(self, data: bytes) -> bytes:
        """The first answer to these bytes on a new connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        async with asyncio.timeout(100):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            assert length is not None
            body = await reader.readexactly(int(length[1]))
        writer.close()
        return head + body

    async def read_until(self, part: bytes) -> None:
        """Read what the process writes, until `part` or its end."""
        assert self.process.stderr is not None
        async with asyncio.timeout(100):
            while part not in self.written and (line := await self.process.stderr.readline()):
                self.written += line


@asynccontextmanager
async def router_process(model_dir: Path, *arguments: str) -> AsyncIterator[RouterProcess]:
    command = ["-m", "services.router", "--instance", "router-0", "--model", str(model_dir)]
    command += ["--listen", "127.0.0.1:0", "--http", "127.0.0.1:0", *arguments]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, stderr=asyncio.subprocess.PIPE, limit=1 << 20
    )
    running = RouterProcess(process)
    try:
        await running.read_until(b"HTTP at ")
        running.port, running.admin_port = (
            int(running.written.split(words)[1].split()[0].rpartition(b":")[2])
            for words in (b"HTTP on ", b"HTTP at ")
        )
        yield running
        process.terminate()
        await running.read_until(b"(never)")
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_no_secret_reaches_the_log_at_any_level(model_dir: Path) -> None:
    async with router_process(model_dir, "--log-level", "debug") as router:
        for name, data in MALFORMED.items():
            answer = await router.send(data)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert re.match(rb"HTTP/1\.[01] 4\d\d ", head), name
            assert b"x-request-id: req-" in head and b"Server: slipstream\r\n" in head, name
            assert json.loads(body)["error"]["code"] == "malformed_http", name
            assert KEY not in answer and PROMPT not in answer, name
        for data in REFUSED:
            assert re.match(rb"HTTP/1\.1 4\d\d ", await router.send(data)), data
    assert KEY not in router.written and PROMPT not in router.written
    assert b"Traceback" not in router.written
    assert router.written.count(b" access: ") == len(REFUSED)


async def test_a_flood_of_malformed_messages_is_counted_and_hardly_logged(model_dir: Path) -> None:
    attack = MALFORMED["control character"]
    began_s = time.monotonic()
    async with router_process(model_dir) as router:
        for _ in range(20):
            await asyncio.gather(*[router.send(attack) for _ in range(20)])
        url = f"http://127.0.0.1:{router.admin_port}/metrics"
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            assert re.search(r"^slipstream_http_malformed_total 400\.0$", await answer.text(), re.M)
    lines = [line for line in router.written.split(b"\n") if b"malformed HTTP" in line]
    assert 1 <= len(lines) <= time.monotonic() - began_s + 1
    assert max(map(len, lines)) < 200


def test_a_line_a_second_counts_those_between(caplog: pytest.LogCaptureFixture) -> None:
    times = [100.0, 100.1, 100.9, 101.0, 101.5, 300.0]
    left, counters = iter(times), Counters()
    malformed = MalformedMessages(counters, clock=lambda: next(left))
    with caplog.at_level(logging.DEBUG):
        for _ in times:
            malformed.note(ValueError("a secret"), "10.0.0.1")
    counts = [int(re.findall(r"(\d+) more", record.getMessage())[0]) for record in caplog.records]
    assert counts == [0, 2, 1]
    assert "a secret" not in caplog.text and "10.0.0.1" in caplog.text
    assert counters.snapshot()["slipstream_http_malformed_total"] == 6


async def test_https_uses_the_certificate_of_grpc_and_asks_for_none(
    model: FakeModel, card: ModelCard
) -> None:
    trust = ssl.create_default_context(cafile=str(TLS.ca))
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "stream": True}
    async with FakeCluster(model, tls=TLS) as cluster, aiohttp.ClientSession() as http:
        async with open_router(cluster, card, tls=TLS) as router:
            url = f"https://{router.http_endpoint}/v1/chat/completions"
            async with http.post(url, json=body, ssl=trust) as answer:
                assert answer.status == 200
                assert (await answer.text()).endswith("data: [DONE]\n\n")
            with pytest.raises(aiohttp.ClientError):
                await http.get(f"http://{router.http_endpoint}/healthz/live")
        async with (
            open_router(cluster, card, tls=TLS, http_tls=False) as router,
            http.get(f"http://{router.http_endpoint}/healthz/live") as answer,
        ):
            assert answer.status == 200

"""The listener of an HTTP port: its bound of connections, and certificates that are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from libs.common.api_bounds import MAX_TARGET_BYTES
from libs.common.connection_shares import ConnectionShares
from libs.common.http.connection import HttpListener, MalformedMessages
from libs.common.http.listening import endpoint_of, listen_tcp
from libs.common.telemetry.counters import Counters
from slipstream.rpc.tls import TlsFiles
from tests.support.tls.authority import Authority, install

REQUEST = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def listening(
    counters: Counters,
    *,
    tls: TlsFiles | None = None,
    max_connections: int = 100,
    keepalive_s: float = 30.0,
    write_stall_s: float = 30.0,
    shares: ConnectionShares | None = None,
    answer: str = "here",
    handler: Handler | None = None,
) -> AsyncIterator[tuple[str, int]]:
    """A listener with one route; its host and port."""

    async def respond(request: web.Request) -> web.Response:
        return web.Response(text=answer)

    application = web.Application()
    application.add_routes([web.get("/", handler or respond)])
    bound = listen_tcp("127.0.0.1:0")
    malformed = MalformedMessages(counters, clock=asyncio.get_running_loop().time)
    listener = HttpListener(
        application,
        bound,
        tls=tls,
        malformed=malformed,
        keepalive_s=keepalive_s,
        max_connections=max_connections,
        write_stall_s=write_stall_s,
        shares=shares,
    )
    await listener.start()
    host, _, port = endpoint_of(bound).rpartition(":")
    try:
        yield host, int(port)
    finally:
        await listener.stop()


async def test_connections_beyond_the_bound_are_closed_and_the_others_are_served() -> None:
    counters = Counters()
    async with listening(counters, max_connections=2) as (host, port), asyncio.timeout(60):
        streams = []
        for _ in range(2):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(REQUEST)
            assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
            streams.append(writer)
        reader, writer = await asyncio.open_connection(host, port)
        assert await reader.read() == b""
        writer.close()
        assert counters.snapshot()["slipstream_http_connections_refused_total"] == 1
        streams.pop().close()
        while True:  # the listener learns a moment later that there is room
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(REQUEST)
            line = b""
            try:
                line = await reader.readline()
            except ConnectionError:
                pass
            writer.close()
            if line == b"HTTP/1.1 200 OK\r\n":
                break
        streams.pop().close()


async def test_a_client_that_reads_no_answer_loses_its_connection() -> None:
    """Its requests fill the buffers of both ends. The one connection that there may be gets free."""
    async with (
        listening(Counters(), max_connections=1, keepalive_s=0.5, write_stall_s=0.5) as (host, port),
        asyncio.timeout(60),
    ):
        with socket.create_connection((host, port)) as unread:
            unread.setblocking(False)
            await _send_until_stuck(unread)
            line = b""
            while line != b"HTTP/1.1 200 OK\r\n":
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(REQUEST)
                with contextlib.suppress(ConnectionError):
                    line = await reader.readline()
                writer.close()


async def _send_until_stuck(client: socket.socket) -> None:
    """Send requests until neither end takes more for a while."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError, ConnectionError):
        while True:
            await asyncio.wait_for(loop.sock_sendall(client, REQUEST * 1000), timeout=1)


async def _name_served(host: str, port: int, files: TlsFiles) -> str:
    trust = ssl.create_default_context(cafile=str(files.ca))
    trust.check_hostname = False
    _, writer = await asyncio.open_connection(host, port, ssl=trust)
    found: Any = writer.get_extra_info("peercert")
    writer.close()
    return str(dict(pair[0] for pair in found["subject"])["commonName"])


async def test_new_connections_get_a_replaced_certificate(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    served, second = authority.issue("first"), authority.issue("second")
    async with listening(Counters(), tls=served) as (host, port), asyncio.timeout(60):
        assert await _name_served(host, port, served) == "first"
        install(second, served)
        assert await _name_served(host, port, served) == "second"
        served.certificate.write_text("no certificate")
        for _ in range(2):
            assert await _name_served(host, port, served) == "second"
        key = served.key.read_text()
        install(authority.issue("third"), served)
        served.key.write_text(key)  # of the second one
        for _ in range(2):
            assert await _name_served(host, port, served) == "second"
    said = [record.message for record in caplog.records if "stays in use" in record.message]
    assert len(said) == 2 and "--tls-certificate: " in said[0]
    assert "--tls-certificate, --tls-key: " in said[1] and "is not the key of" in said[1]


async def test_a_path_of_thousands_of_slashes_is_refused_before_it_is_looked_up() -> None:
    async with listening(Counters()) as (host, port), asyncio.timeout(60):
        for length, status in ((MAX_TARGET_BYTES, b"404"), (MAX_TARGET_BYTES + 1, b"431")):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET " + b"/" * length + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).split()[1] == status
            writer.close()

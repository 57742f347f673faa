"""TLS handshakes of an HTTP port that are begun and left: bounded in number and memory."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
from asyncio import sslproto
from collections.abc import Iterator

import pytest

from libs.common.connection_shares import ConnectionShares
from libs.common.telemetry.counters import Counters
from slipstream.rpc.tls import TlsFiles
from tests.common.http.test_listener import REQUEST, listening
from tests.support.tls.authority import Authority

REFUSED = "slipstream_http_connections_refused_total"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return Authority(tmp_path_factory.mktemp("tls")).issue("served")


@pytest.fixture(autouse=True)
def default_buffers() -> Iterator[None]:
    """The size of asyncio's buffers, which a listener changes for its process."""
    size = sslproto.SSLProtocol.max_size
    yield
    sslproto.SSLProtocol.max_size = size


def trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def served_line(host: str, port: int) -> bytes:
    """The first line of an answer, empty for a connection that is closed."""
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=trusting())
        writer.write(REQUEST)
        line = await reader.readline()
    except OSError:
        return b""
    writer.close()
    return line


async def test_open_handshakes_count_as_connections(served: TlsFiles) -> None:
    counters = Counters()
    async with listening(counters, tls=served, max_connections=2) as (host, port), asyncio.timeout(60):
        silent = [await asyncio.open_connection(host, port) for _ in range(2)]
        assert await served_line(host, port) == b""
        assert counters.snapshot()[REFUSED] == 1
        silent[0][1].write(b"no handshake")  # it fails, and counts no longer
        silent[1][1].close()
        while await served_line(host, port) != b"HTTP/1.1 200 OK\r\n":
            await asyncio.sleep(0.01)


async def test_an_open_handshake_has_a_small_buffer(served: TlsFiles) -> None:
    async with listening(Counters(), tls=served) as (host, port), asyncio.timeout(60):
        silent = [await asyncio.open_connection(host, port) for _ in range(20)]
        buffers: list[int] = []
        while len(buffers) < len(silent):
            await asyncio.sleep(0.01)
            ends = [end for end in gc.get_objects() if isinstance(end, sslproto.SSLProtocol)]
            buffers = [len(vars(end)["_ssl_buffer"]) for end in ends if vars(end)["_server_side"]]
        assert max(buffers) <= 32 << 10
        for _, writer in silent:
            writer.close()


async def test_a_request_that_arrives_with_the_end_of_the_handshake_is_served(served: TlsFiles) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting().wrap_bio(incoming, outgoing)
    async with listening(Counters(), tls=served) as (host, port), asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(host, port)
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
                break
            writer.write(outgoing.read())
            incoming.write(await reader.read(1 << 16))
        client.write(REQUEST)
        writer.write(outgoing.read())  # the client's last handshake message, and the request
        answer = b""
        while b"here" not in answer:
            incoming.write(await reader.read(1 << 16))
            with contextlib.suppress(ssl.SSLWantReadError):
                answer += client.read(1 << 16)
        writer.close()


async def test_handshakes_have_the_share_of_their_address(
    served: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = ConnectionShares(most_address=1)
    monkeypatch.setattr("libs.common.http.connection._address_of", lambda transport: "10.0.0.7")
    counters = Counters()
    async with listening(counters, tls=served, shares=shares) as (host, port), asyncio.timeout(60):
        _, silent = await asyncio.open_connection(host, port)
        assert await served_line(host, port) == b""
        silent.close()
        while shares.nameless:
            await asyncio.sleep(0.01)
        assert await served_line(host, port) == b"HTTP/1.1 200 OK\r\n"


def n_ends() -> int:
    return sum(isinstance(each, sslproto.SSLProtocol) for each in gc.get_objects())


async def test_a_failed_handshake_leaves_nothing_for_the_garbage_collector(
    served: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_made, make = 0, sslproto.SSLProtocol.connection_made

    def counted(end: sslproto.SSLProtocol, transport: asyncio.BaseTransport) -> None:
        nonlocal n_made
        n_made += 1
        make(end, transport)

    monkeypatch.setattr(sslproto.SSLProtocol, "connection_made", counted)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        trusting().wrap_bio(incoming, outgoing).do_handshake()
    async with listening(Counters(), tls=served) as (host, port), asyncio.timeout(60):
        gc.collect()
        gc.disable()
        try:
            for data in (outgoing.read(), b"no handshake", b""):
                for _ in range(5):
                    _, writer = await asyncio.open_connection(host, port)
                    writer.write(data)
                    await asyncio.sleep(0.02)
                    writer.close()
            while n_made < 15 or n_ends():
                await asyncio.sleep(0.01)
        finally:
            gc.enable()

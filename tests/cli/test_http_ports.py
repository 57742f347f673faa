"""A client of gRPC that was given a port for HTTP: the error says so, with TLS and without."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from libs.common.http.connection import server_context
from slipstream.async_client import AsyncClient
from slipstream.cli.fleet.fleet_client import FleetClient
from slipstream.errors import Unavailable
from slipstream.rpc.dial import Dial
from slipstream.rpc.tls import TlsFiles
from tests.support.tls.authority import Authority


@asynccontextmanager
async def http_port(tls: TlsFiles | None) -> AsyncIterator[str]:
    """A server of HTTP alone; yields HOST:PORT."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        context = None if tls is None else server_context(tls)
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("serves_tls", "calls_by_tls", "words", "operators_words"),
    [
        (False, False, "this is a port for HTTP", "a port for HTTP: of a router, ask the gRPC admin port"),
        (True, True, "this is a port for HTTP", "a port for HTTP: of a router, ask the gRPC admin port"),
        (True, False, "the port may speak TLS", "the port may speak TLS"),
        (False, True, "the port is without TLS", "it serves without TLS"),
    ],
)
async def test_a_port_for_http_is_named(
    tmp_path: Path, serves_tls: bool, calls_by_tls: bool, words: str, operators_words: str
) -> None:
    authority = Authority(tmp_path)
    tls = authority.issue("client") if calls_by_tls else None
    async with http_port(authority.issue("served") if serves_tls else None) as endpoint:
        async with AsyncClient(endpoint, tls=tls, timeout_s=10) as client:
            with pytest.raises(Unavailable, match=words):
                await client.models()
        with pytest.raises(Exception, match=operators_words):
            await FleetClient([endpoint], Dial(tls)).get()

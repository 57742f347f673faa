"""A stream over TLS whose client reads nothing costs what a plain one costs, and leaves its workers."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from typing import Any

from libs.common.service_bounds import HTTP_UNWRITTEN_BYTES
from services.router.request.model_card import ModelCard
from tests.router.api.http.test_slow_readers import BODY
from tests.router.conftest import WAIT_S, eventually, open_router, script
from tests.router.support.fake_cluster import FakeCluster
from tests.router.support.fake_model import FakeModel
from tests.router.test_client_trust import PEERS

LETTERS = "abcdefgh"
TOKENS = 1500
# What one write may add beyond the mark, and what encrypts it.
_MARGIN_BYTES = 64 << 10


def ask(endpoint: str, body: dict[str, Any]) -> ssl.SSLSocket:
    """A connection that has sent a request and read nothing."""
    host, _, port = endpoint.rpartition(":")
    plain = socket.socket()
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    plain.settimeout(WAIT_S)
    plain.connect((host, int(port)))
    context = ssl.create_default_context(cafile=PEERS.ca)
    connection = context.wrap_socket(plain, server_hostname=host)
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {endpoint}\r\nContent-Length: {len(data)}\r\n"
    connection.sendall(f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n".encode() + data)
    return connection


def read_all(connection: ssl.SSLSocket) -> bytes:
    """What is left to read."""
    said = b""
    while piece := connection.recv(1 << 16):
        said += piece
    return said


async def test_an_unread_stream_over_tls_keeps_little_and_goes_on_when_it_is_read(
    model: FakeModel, card: ModelCard
) -> None:
    async with FakeCluster(model, tls=PEERS) as cluster:
        letters = [card.tokenizer.encode_text(letter)[0] for letter in LETTERS]
        script(cluster.model, [letters[index % 8] for index in range(TOKENS)] + [card.stop_token_ids[0]])
        async with open_router(cluster, card, tls=PEERS, write_stall_s=10 * WAIT_S) as router:
            router.ports.http.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
            connection = await asyncio.to_thread(ask, router.http_endpoint, BODY)
            await eventually(lambda: router.manager.held == 1)
            (run,) = router.manager.running
            await eventually(lambda: run.is_suspended)
            server = router._http_listener._runner.server
            assert server is not None
            (served,) = server.connections
            assert served.transport is not None
            kept_bytes = served.transport.get_write_buffer_size()
            assert 0 < kept_bytes <= HTTP_UNWRITTEN_BYTES + _MARGIN_BYTES
            said = await asyncio.to_thread(read_all, connection)
            assert said.count(b'"finish_reason":"stop"') == 1 and b"data: [DONE]" in said
            connection.close()
            await eventually(lambda: not router.manager.held and not cluster.held)

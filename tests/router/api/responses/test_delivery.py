"""Stored responses that clients ask for and do not read: bounded by tenant, sent in pieces, whole at last."""

from __future__ import annotations

import asyncio
import json
import socket
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from libs.common import api_bounds
from libs.database.database import Database
from services.router.api.http.piece_stream import PIECE_BYTES
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from tests.router.api.http.test_slow_readers import RawClient
from tests.router.conftest import WAIT_S, open_router
from tests.router.support.answer_events import sse_objects
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys

PATH = "/v1/responses"
LONG_TEXT = "x" * 300_000
KEYS = {"key-a": "anna", "key-b": "bert"}


@pytest.fixture
async def router(
    cluster: FakeCluster, card: ModelCard, database: Database, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RouterServer]:
    """With room for two long responses of a tenant. No client is cut off in the time of a test."""
    monkeypatch.setattr(api_bounds, "MAX_TENANT_SENT_RESPONSE_BYTES", 5 * len(LONG_TEXT) // 2)
    options = {"database": database, "keys": tenant_keys(KEYS), "write_stall_s": 10 * WAIT_S}
    async with open_router(cluster, card, **options) as opened:
        opened.ports.http.setsockopt(1, 7, 1 << 12)  # SO_SNDBUF
        yield opened


@pytest.fixture
async def http(router: RouterServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as session:
        yield session


async def status_of(http: aiohttp.ClientSession, key: str, path: str) -> int:
    async with http.get(path, headers={"x-api-key": key}) as answer:
        await answer.read()
        return answer.status


async def long_response(http: aiohttp.ClientSession, database: Database, key: str) -> str:
    """The path of a response that ran in the background, and has a long text."""
    headers = {"x-api-key": key}
    async with http.post(PATH, json={"input": "Hello.", "background": True}, headers=headers) as answer:
        path = f"{PATH}/{(await answer.json())['id']}"
    async with asyncio.timeout(WAIT_S):
        while True:
            async with http.get(path, headers=headers) as answer:
                body = await answer.json()
            if body["status"] == "completed":
                break
            await asyncio.sleep(0.02)
    data = zlib.compress(json.dumps({**body, "instructions": LONG_TEXT}).encode())
    sql = "UPDATE stored_responses SET body = ? WHERE id = ?"
    await database.run(lambda tx: tx.execute(sql, (data, body["id"])))
    return path


@pytest.mark.parametrize("query", ["", "?stream=true", "/input_items"])
async def test_head_gets_no_body_that_passes_for_the_next_answer(
    router: RouterServer, http: aiohttp.ClientSession, database: Database, query: str
) -> None:
    of_anna = await long_response(http, database, "key-a")
    head = f"Host: {router.http_endpoint}\r\nx-api-key: key-a\r\n"
    calls = f"HEAD {of_anna}{query} HTTP/1.1\r\n{head}\r\nGET /v1/models HTTP/1.1\r\n{head}"
    reader, writer = await asyncio.open_connection(*router.http_endpoint.split(":"))
    async with asyncio.timeout(WAIT_S):
        writer.write(f"{calls}Connection: close\r\n\r\n".encode())
        first, _, second = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert first.startswith(b"HTTP/1.1 405 ")
    assert second.startswith(b"HTTP/1.1 200 ")


def peek(client: RawClient) -> bytes | None:
    """The first bytes that have come, which stay unread; None before them."""
    try:
        return client.socket.recv(12, socket.MSG_PEEK)
    except BlockingIOError:
        return None


@pytest.mark.parametrize("query", ["", "?stream=true"])
async def test_unread_stored_responses_are_bounded_by_tenant(
    router: RouterServer,
    http: aiohttp.ClientSession,
    database: Database,
    monkeypatch: pytest.MonkeyPatch,
    query: str,
) -> None:
    write, pieces = web.StreamResponse.write, list[int]()

    async def count(response: web.StreamResponse, data: bytes) -> None:
        pieces.append(len(data))
        await write(response, data)

    monkeypatch.setattr(web.StreamResponse, "write", count)
    of_anna, of_bert = [await long_response(http, database, key) for key in KEYS]
    clients = [RawClient("key-a") for _ in range(2)]
    for client in clients:
        await client.send(router.http_endpoint, f"GET {of_anna}{query}")
        async with asyncio.timeout(WAIT_S):
            while (begun := peek(client)) != b"HTTP/1.1 200":
                assert begun is None
                await asyncio.sleep(0.02)
    assert await status_of(http, "key-a", of_anna + query) == 429
    assert await status_of(http, "key-b", of_bert + query) == 200
    assert await status_of(http, "key-a", f"{of_anna}/input_items") == 200  # a short answer needs no room
    assert 0 < max(pieces) <= PIECE_BYTES
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(*[client.read_all() for client in clients])
    for client in clients:
        if query:
            read = sse_objects(client.body())[-1]["response"]
        else:
            read = json.loads(client.received.partition(b"\r\n\r\n")[2])
        assert read["instructions"] == LONG_TEXT
        client.socket.close()
    async with asyncio.timeout(WAIT_S):
        while await status_of(http, "key-a", of_anna + query) != 200:
            await asyncio.sleep(0.02)


async def test_unread_whole_answers_are_bounded_by_tenant_like_stored_ones(
    cluster: FakeCluster, card: ModelCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer repeats the instructions of its request."""
    monkeypatch.setattr(api_bounds, "MAX_TENANT_SENT_RESPONSE_BYTES", 5 * len(LONG_TEXT) // 2)
    options = {"keys": tenant_keys(KEYS), "write_stall_s": 10 * WAIT_S}
    body = {"input": "Hello.", "instructions": LONG_TEXT, "max_output_tokens": 3}
    async with open_router(cluster, replace(card, model_context_tokens=1 << 20), **options) as router:
        router.ports.http.setsockopt(1, 7, 1 << 12)  # SO_SNDBUF
        clients = [RawClient("key-a") for _ in range(2)]
        for client in clients:
            await client.post(router.http_endpoint, body, path=PATH)
            async with asyncio.timeout(WAIT_S):
                while (begun := peek(client)) != b"HTTP/1.1 200":
                    assert begun is None
                    await asyncio.sleep(0.02)
        assert router.manager.held == 0  # an answer on its way takes no place of a request

        async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as session:

            async def status(key: str, **fields: Any) -> int:
                async with session.post(PATH, json={**body, **fields}, headers={"x-api-key": key}) as answer:
                    await answer.read()
                    return int(answer.status)

            assert await status("key-a") == 429
            assert await status("key-a", instructions="Be brief.") == 200
            assert await status("key-b") == 200
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*[client.read_all() for client in clients])
            for client in clients:
                read = json.loads(client.received.partition(b"\r\n\r\n")[2])
                assert read["instructions"] == LONG_TEXT
                client.socket.close()
            async with asyncio.timeout(WAIT_S):
                while await status("key-a") != 200:
                    await asyncio.sleep(0.02)

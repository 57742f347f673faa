"""What runs by a key that is revoked ends; what runs by other keys goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.router import server
from services.router.api.api_keys import ApiKeys, follow_keys
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.async_client import AsyncClient
from slipstream.credentials.api_key_file import KeyRecord, KeyScope, add_key, key_hash, revoke_key
from slipstream.errors import Unauthenticated
from tests.router.conftest import HELLO, WAIT_S, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster


class Keys:
    """Two keys of one tenant in a file that the router follows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost = add_key(path, name="lost", tenant="anna")
        self.kept = add_key(path, name="kept", tenant="anna")
        self.known = ApiKeys()
        self._reload = follow_keys(path, self.known)

    async def revoke(self) -> None:
        revoke_key(self.path, "lost")
        await self._reload.poll()


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.setattr(server, "_KEYS_CHECK_S", 0.05)
    return Keys(tmp_path / "keys.toml")


@pytest.fixture
async def router(cluster: FakeCluster, card: ModelCard, keys: Keys) -> AsyncIterator[RouterServer]:
    """A router whose streams stand still after their first frame."""
    for worker in cluster.decodes:
        worker.gate.clear()
    async with open_router(cluster, card, keys=keys.known) as running:
        yield running


async def read(stream: Any) -> str:
    return "".join([delta.text async for delta in stream])


async def test_a_grpc_stream_ends_and_that_of_another_key_goes_on(
    cluster: FakeCluster, router: RouterServer, keys: Keys
) -> None:
    async with (
        AsyncClient(router.host.endpoint, api_key=keys.lost) as lost,
        AsyncClient(router.host.endpoint, api_key=keys.kept) as kept,
    ):
        reads = [asyncio.create_task(read(client.stream_chat(HELLO))) for client in (lost, kept)]
        await eventually(lambda: router.manager.held == 2)
        await keys.revoke()
        with pytest.raises(Unauthenticated, match="revoked"):
            await asyncio.wait_for(reads[0], WAIT_S)
        assert not reads[1].done()
        for worker in cluster.decodes:
            worker.gate.set()
        assert await asyncio.wait_for(reads[1], WAIT_S)
    await eventually(lambda: not router.manager.held and not cluster.held)


async def test_an_http_stream_and_a_whole_answer_end(
    cluster: FakeCluster, router: RouterServer, keys: Keys
) -> None:
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as session:

        async def post(stream: bool) -> tuple[int, str]:
            body = {"messages": HELLO, "stream": stream}
            headers = {"x-api-key": keys.lost}
            async with session.post("/v1/chat/completions", json=body, headers=headers) as response:
                return response.status, await response.text()

        asked = [asyncio.create_task(post(stream)) for stream in (True, False)]
        await eventually(lambda: router.manager.held == 2)
        await eventually(lambda: all(run.sink.completion_tokens for run in router.manager.running))
        await keys.revoke()
        (stream_status, events), (status, answer) = await asyncio.wait_for(asyncio.gather(*asked), WAIT_S)
    last = json.loads(events.rstrip().rpartition("data: ")[2])
    assert (stream_status, last["error"]["code"]) == (200, "invalid_api_key")
    assert (status, json.loads(answer)["error"]["code"]) == (401, "invalid_api_key")
    await eventually(lambda: not router.manager.held and not cluster.held)


def test_an_expired_key_counts_no_longer() -> None:
    now_s = 0.0
    records = (KeyRecord("short", "anna", KeyScope.TENANT, key_hash("one"), expires_s=10.0),)
    keys = ApiKeys(records, wall_clock_s=lambda: now_s)
    given = keys.hash_of({"x-api-key": "one"})
    assert keys.counts(given) and keys.counts(b"")
    now_s = 11.0
    assert not keys.counts(given) and keys.counts(b"")


def test_nothing_ends_where_no_keys_are_needed() -> None:
    assert ApiKeys().counts(ApiKeys().hash_of({"x-api-key": "one"}))

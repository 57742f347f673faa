"""A tenant frees room on a disk that is nearly full, and nothing new is stored meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from libs.database.database import Database
from libs.database.sqlite import SqliteDriver
from services.router.request.model_card import ModelCard
from tests.router.api.batches.conftest import CHAT, line
from tests.router.conftest import HELLO, open_router
from tests.router.support.fake_cluster import FakeCluster

DISK_BYTES = 1 << 30
FREE_BYTES = [DISK_BYTES]


@pytest.fixture
async def http(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[aiohttp.ClientSession]:
    FREE_BYTES[0] = DISK_BYTES
    driver = SqliteDriver(tmp_path / "router.db", disk_room=lambda _: (FREE_BYTES[0], DISK_BYTES))
    database = Database(driver)
    async with (
        open_router(cluster, card, database=database) as router,
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as session,
    ):
        yield session
    await database.close()


async def _ask(http: aiohttp.ClientSession, method: str, path: str, **given: Any) -> tuple[int, Any]:
    async with http.request(method, path, **given) as answer:
        return answer.status, await answer.json()


async def _upload(http: aiohttp.ClientSession) -> tuple[int, Any]:
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", line("a"), filename="in.jsonl", content_type="application/jsonl")
    return await _ask(http, "POST", "/v1/files", data=form)


async def test_what_frees_room_goes_on(http: aiohttp.ClientSession) -> None:
    status, file = await _upload(http)
    body = {"input": "hi", "store": True}
    stored_status, stored = await _ask(http, "POST", "/v1/responses", json=body)
    assert (status, stored_status) == (200, 200)
    FREE_BYTES[0] = 0
    batch = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
    refused = [
        await _upload(http),
        await _ask(http, "POST", "/v1/responses", json=body),
        await _ask(http, "POST", "/v1/responses", json={"input": "hi", "background": True}),
        await _ask(http, "POST", "/v1/batches", json=batch),
    ]
    for status, said in refused:
        assert (status, said["error"]["message"]) == (507, "the disk of the database is full")
    assert (await _ask(http, "POST", CHAT, json={"messages": HELLO}))[0] == 200
    assert (await _ask(http, "DELETE", f"/v1/files/{file['id']}"))[0] == 200
    assert (await _ask(http, "DELETE", f"/v1/responses/{stored['id']}"))[0] == 200
    assert (await _ask(http, "GET", "/v1/files"))[1]["data"] == []
    FREE_BYTES[0] = DISK_BYTES
    assert (await _upload(http))[0] == 200

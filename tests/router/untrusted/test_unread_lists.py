"""Long answers beside generated ones: they count for their tenant until its clients have read them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest

from libs.common import api_bounds
from libs.database.database import Database
from services.router.api.batches.file_store import FileStore, NewFile
from services.router.api.http.piece_stream import PIECE_BYTES
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.v1 import jobs_pb2, jobs_pb2_grpc, router_pb2, router_pb2_grpc
from tests.database.conftest import database  # noqa: F401 - a fixture
from tests.router.conftest import WAIT_S, eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys

KEYS = {"key-a": "anna", "key-b": "bert"}
LONG = "x" * (2 * PIECE_BYTES)
RUN = "5f4e4d2c-0000-4000-8000-000000000000"


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path}/router.db"


@pytest.fixture
async def router(
    cluster: FakeCluster,
    card: ModelCard,
    database: Database,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[RouterServer]:
    """With room for no long answer of a tenant that has one already."""
    monkeypatch.setattr(api_bounds, "MAX_TENANT_SENT_RESPONSE_BYTES", 1 << 20)
    async with open_router(cluster, card, database=database, keys=tenant_keys(KEYS)) as opened:
        yield opened


async def store_file(database: Database, tenant: str) -> str:  # noqa: F811
    writer = await FileStore(database, wall_clock_s=time.time).begin(NewFile(tenant, "a.jsonl", "batch"))
    await writer.append(LONG.encode())
    return f"/v1/files/{(await writer.finish(ttl_s=3600)).id}/content"


async def store_usage(database: Database, tenant: str) -> str:  # noqa: F811
    day = time.strftime("%Y-%m-%d", time.gmtime())
    rows = [(tenant, f"{'k' * 100}{n}", "m", "/", day, "", 1, 1, 1, 1, 1, 1) for n in range(1000)]
    sql = f"INSERT INTO usage_counters VALUES ({', '.join('?' * 12)})"
    await database.run(lambda tx: tx.execute_many(sql, rows))
    return "/v1/usage?group_by=key"


async def store_batch(database: Database, tenant: str) -> str:  # noqa: F811
    record: dict[str, Any] = {
        "id": "batch_1",
        "tenant": tenant,
        "endpoint": "/",
        "input_file": "f",
        "window": "24h",
    }
    record |= {"state": "failed", "created_unix_s": 1.0, "expires_unix_s": 2.0, "output_ttl_s": 9}
    text = json.dumps({**record, "metadata": {"k": LONG}})
    sql = "INSERT INTO batches (id, tenant, state, input_file, record, lease, lease_until_unix_s)"
    values = (f"batch_{tenant}", tenant, "failed", "f", text)
    await database.run(lambda tx: tx.execute(f"{sql} VALUES (?, ?, ?, ?, ?, '', 0)", values))
    return "/v1/batches"


async def status_of(router: RouterServer, key: str, path: str, body: Any = None) -> int:
    method = "GET" if body is None else "POST"
    async with (
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as session,
        session.request(method, path, json=body, headers={"x-api-key": key}) as answer,
    ):
        await answer.read()
        return answer.status


@pytest.mark.parametrize("store", [store_file, store_usage, store_batch])
async def test_a_long_answer_waits_for_no_memory_beyond_the_share(
    router: RouterServer,
    database: Database,  # noqa: F811
    store: Any,
) -> None:
    path = await store(database, "anna")
    other = await store_file(database, "bert")
    with router._http.generation.delivery.sending("anna", 1 << 20):
        assert await status_of(router, "key-a", path) == 429
        assert await status_of(router, "key-b", other) == 200
    assert await status_of(router, "key-a", path) == 200


async def test_long_answers_about_tokens_count_too(router: RouterServer) -> None:
    body = {"tokens": [5] * 50_000}
    with router._http.generation.delivery.sending("anna", 1 << 20):
        assert await status_of(router, "key-a", "/detokenize", body) == 429
        assert await status_of(router, "key-b", "/detokenize", body) == 200
    assert await status_of(router, "key-a", "/detokenize", body) == 200


async def test_a_few_bodies_of_a_tenant_become_tokens_at_a_time(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = router._http._tokens._texts
    running, most, write = 0, 0, texts.text

    async def text(*arguments: Any, **options: Any) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return await write(*arguments, **options)

    monkeypatch.setattr(texts, "text", text)
    calls = [status_of(router, "key-a", "/detokenize", {"tokens": [5]}) for _ in range(24)]
    assert set(await asyncio.gather(*calls)) == {200}
    assert 1 < most <= 4
    assert not router.manager.texts.held_chars


async def test_answers_of_queued_runs_count_too(router: RouterServer, database: Database) -> None:  # noqa: F811
    store = router.jobs.store
    assert store is not None
    await store.counts("anna")  # makes the tables
    answer = {"choices": [{"message": {"content": LONG}, "finish_reason": "stop"}], "usage": {}}
    row = ("job-1", "anna", f"run_{RUN}", "openai", None, "", "", "/", "succeeded", "", 1, 0, 200, "", 0, 0)
    times = (1.0, 1.0, time.time(), 1.0, 1.0, 1e9)

    def insert(tx: Any) -> None:
        values = (*row, *times, None, None, "", 0)
        tx.execute(f"INSERT INTO jobs VALUES ({', '.join('?' * len(values))})", values)
        tx.execute("INSERT INTO job_results VALUES (?, ?)", ("job-1", json.dumps(answer).encode()))

    await database.run(insert)
    path = f"/client/v4/accounts/a/ai/run/{router.pipeline.card.name}"
    assert await status_of(router, "key-a", path, {"request_id": RUN}) == 200
    with router._http.generation.delivery.sending("anna", 1 << 20):
        assert await status_of(router, "key-a", path, {"request_id": RUN}) == 429


async def test_long_answers_over_grpc_count_until_they_are_read(
    router: RouterServer,
    database: Database,  # noqa: F811
) -> None:
    await store_usage(database, "anna")
    async with grpc.aio.insecure_channel(router.host.endpoint) as channel:
        stub: Any = router_pb2_grpc.RouterServiceStub(channel)
        request = router_pb2.GetUsageRequest(group_by=[router_pb2.USAGE_GROUP_KEY])
        mine = (("x-api-key", "key-a"),)
        assert len((await stub.GetUsage(request, metadata=mine, timeout=WAIT_S)).rows) == 1000
        await eventually(lambda: not router._grpc._sent.held_chars)
        router._grpc._sent.acquire("anna", 1 << 20)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.GetUsage(request, metadata=mine, timeout=WAIT_S)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        jobs: Any = jobs_pb2_grpc.JobServiceStub(channel)
        assert not (await jobs.ListJobs(jobs_pb2.ListJobsRequest(), metadata=mine, timeout=WAIT_S)).jobs

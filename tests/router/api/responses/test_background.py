"""Responses in the background over HTTP, before fake workers."""

from __future__ import annotations

import asyncio
import gzip
import importlib
import json
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from libs.common.api_bounds import MAX_TENANT_RESPONSE_CALLS
from libs.database.database import open_database
from services.router.jobs.leases import JobLeases
from services.router.jobs.store import JobStore
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from tests.router.conftest import WAIT_S, eventually, open_router
from tests.router.support.answer_events import sse_objects
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys

PATH = "/v1/responses"
BODY: dict[str, Any] = {"input": "Hello.", "background": True, "metadata": {"a": "b"}}


@pytest.fixture
async def server(cluster: FakeCluster, card: ModelCard, tmp_path: Path) -> AsyncIterator[RouterServer]:
    database = open_database(f"sqlite:{tmp_path}/test.db")
    keys = tenant_keys({"key-a": "anna", "key-b": "bert"})
    async with open_router(cluster, card, database=database, keys=keys) as opened:
        yield opened
    await database.close()


@pytest.fixture
async def http(server: RouterServer) -> AsyncIterator[aiohttp.ClientSession]:
    url, headers = f"http://{server.http_endpoint}", {"x-api-key": "key-a"}
    async with aiohttp.ClientSession(url, headers=headers) as session:
        yield session


async def ask(http: aiohttp.ClientSession, method: str, path: str, status: int = 200, **options: Any) -> Any:
    async with http.request(method, path, **options) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def events(http: aiohttp.ClientSession, path: str) -> list[Mapping[str, Any]]:
    async with http.get(path) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        return objects(await answer.read())


def objects(data: bytes) -> list[Mapping[str, Any]]:
    return sse_objects(b"\n\n".join([event for event in data.split(b"\n\n") if event[:1] != b":"]))


async def ended(http: aiohttp.ClientSession, response: Mapping[str, Any]) -> Any:
    async with asyncio.timeout(WAIT_S):
        while True:
            found = await ask(http, "GET", f"{PATH}/{response['id']}")
            if found["status"] not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.02)


async def test_a_response_runs_without_its_client(http: aiohttp.ClientSession) -> None:
    direct = await ask(http, "POST", PATH, json={**BODY, "background": False, "seed": 3})
    data = gzip.compress(json.dumps({**BODY, "seed": 3}).encode())
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    begun = await ask(http, "POST", PATH, data=data, headers=headers)
    assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
    assert begun["metadata"] == {"a": "b"} and begun["model"] == direct["model"]
    done = await ended(http, begun)
    assert (done["id"], done["status"], done["background"]) == (begun["id"], "completed", True)
    assert done["output"][0]["content"] == direct["output"][0]["content"]
    assert done["usage"]["output_tokens"] == direct["usage"]["output_tokens"]
    going_on = await ask(http, "POST", PATH, json={"input": "Go on.", "previous_response_id": done["id"]})
    assert going_on["status"] == "completed"
    path = f"{PATH}/{done['id']}"
    assert await ask(http, "POST", f"{path}/cancel") == done  # it has ended
    for method, each in (("GET", path), ("POST", f"{path}/cancel"), ("DELETE", path)):
        await ask(http, method, each, 404, headers={"x-api-key": "key-b"})
    assert (await ask(http, "DELETE", path))["deleted"]
    await ask(http, "GET", path, 404)


async def test_a_stream_is_read_again_from_any_event(
    http: aiohttp.ClientSession, cluster: FakeCluster, server: RouterServer
) -> None:
    for decode in cluster.decodes:
        decode.gate.clear()
    async with http.post(PATH, json={**BODY, "stream": True}) as answer:
        assert answer.content_type == "text/event-stream"
        first = await answer.content.readuntil(b"\n\n")
        [created] = objects(first)
        assert (created["type"], created["response"]["status"]) == ("response.created", "queued")
        await eventually(lambda: bool(server.manager.running))
        for decode in cluster.decodes:
            decode.gate.set()
        async with asyncio.timeout(WAIT_S):
            seen = objects(first + await answer.content.read())
    path = f"{PATH}/{created['response']['id']}"
    assert seen[-1]["type"] == "response.completed"
    assert seen[-1]["response"] == await ask(http, "GET", path)
    text = "".join([each["delta"] for each in seen if each["type"] == "response.output_text.delta"])
    assert text == seen[-1]["response"]["output"][0]["content"][0]["text"] != ""
    assert await events(http, f"{path}?stream=true") == seen
    assert await events(http, f"{path}?stream=true&starting_after=2") == seen[3:]
    last = seen[-1]["sequence_number"]
    async with http.get(f"{path}?stream=true&starting_after={last}") as answer:
        assert (answer.status, await answer.text()) == (200, "")
    for query, field in (
        ("stream=maybe", "stream"),
        ("stream=true&starting_after=-1", "starting_after"),
        (f"stream=true&starting_after={last + 1}", "starting_after"),
        ("starting_after=2", "starting_after"),
        ("stream=false&starting_after=2", "starting_after"),
    ):
        assert (await ask(http, "GET", f"{path}?{query}", 400))["error"]["param"] == field


async def test_a_response_that_runs_is_cancelled(
    http: aiohttp.ClientSession, cluster: FakeCluster, server: RouterServer
) -> None:
    for decode in cluster.decodes:
        decode.gate.clear()
    begun = await ask(http, "POST", PATH, json=BODY)
    path = f"{PATH}/{begun['id']}"
    async with asyncio.timeout(WAIT_S):
        while (await ask(http, "GET", path))["status"] != "in_progress":
            await asyncio.sleep(0.02)
    await ask(http, "DELETE", path, 400)
    cancelled = await ask(http, "POST", f"{path}/cancel")
    assert (cancelled["status"], cancelled["output"]) == ("cancelled", [])
    for decode in cluster.decodes:
        decode.gate.set()
    await eventually(lambda: not server.manager.running)
    assert await ask(http, "GET", path) == cancelled  # what ended after it is not stored
    assert (await events(http, f"{path}?stream=true"))[-1]["response"] == cancelled
    assert (await ask(http, "DELETE", path))["deleted"]
    await ask(http, "GET", path, 404)


async def test_a_response_without_an_answer_has_its_input_and_cannot_be_continued(
    http: aiohttp.ClientSession, server: RouterServer
) -> None:
    first = await ask(http, "POST", PATH, json={"input": "Hello."})
    said = {"type": "item_reference", "id": first["output"][0]["id"]}
    server.manager.drain()  # nothing is pulled
    begun = await ask(
        http, "POST", PATH, json={**BODY, "input": [said, {"role": "user", "content": "Go on."}]}
    )
    path, going_on = f"{PATH}/{begun['id']}", {"input": "More.", "previous_response_id": begun["id"]}
    waiting = await ask(http, "GET", f"{path}/input_items?order=asc")
    assert waiting["data"][0]["id"] == said["id"]
    assert waiting["data"][1]["content"] == [{"type": "input_text", "text": "Go on."}]
    assert (await ask(http, "GET", f"{path}/input_items?limit=1"))["data"] == waiting["data"][1:]
    await ask(http, "GET", f"{path}/input_items", 404, headers={"x-api-key": "key-b"})
    for body in (going_on, {**going_on, "background": True}):
        error = (await ask(http, "POST", PATH, 400, json=body))["error"]
        assert error["param"] == "previous_response_id" and "can be continued" in error["message"]
    await ask(http, "POST", PATH, 404, json=going_on, headers={"x-api-key": "key-b"})
    server.manager.undrain()
    assert (await ended(http, begun))["status"] == "completed"
    assert await ask(http, "GET", f"{path}/input_items?order=asc") == waiting
    assert (await ask(http, "POST", PATH, json=going_on))["status"] == "completed"
    server.manager.drain()
    begun = await ask(http, "POST", PATH, json=BODY)
    await ask(http, "POST", f"{PATH}/{begun['id']}/cancel")
    assert len((await ask(http, "GET", f"{PATH}/{begun['id']}/input_items"))["data"]) == 1
    server.manager.undrain()
    refused = await ask(http, "POST", PATH, 400, json={**going_on, "previous_response_id": begun["id"]})
    assert "is cancelled" in refused["error"]["message"]


async def test_inputs_of_one_tenant_are_read_a_few_at_a_time(
    http: aiohttp.ClientSession, server: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.manager.drain()  # nothing is pulled
    path = f"{PATH}/{(await ask(http, 'POST', PATH, json=BODY))['id']}/input_items"
    read, may_read = JobStore.request, asyncio.Event()
    n_reading, most = 0, 0

    async def wait(jobs: JobStore, tenant: str, job_id: str) -> bytes:
        nonlocal n_reading, most
        n_reading += 1
        most = max(most, n_reading)
        await may_read.wait()
        n_reading -= 1
        return await read(jobs, tenant, job_id)

    monkeypatch.setattr(JobStore, "request", wait)
    calls = [asyncio.create_task(ask(http, "GET", path)) for _ in range(3 * MAX_TENANT_RESPONSE_CALLS)]
    await eventually(lambda: n_reading == MAX_TENANT_RESPONSE_CALLS)
    may_read.set()
    await asyncio.gather(*calls)
    assert most == MAX_TENANT_RESPONSE_CALLS


async def test_an_answer_that_comes_as_its_job_is_cancelled_is_never_found(
    http: aiohttp.ClientSession, server: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not when the job, which says that it was cancelled, is dropped after its retention."""
    answered, may_end, finish = asyncio.Event(), asyncio.Event(), JobLeases.finish

    async def late(*given: Any) -> bool:
        answered.set()
        await may_end.wait()
        return await finish(*given)

    monkeypatch.setattr(JobLeases, "finish", late)
    begun = await ask(http, "POST", PATH, json=BODY)
    path = f"{PATH}/{begun['id']}"
    async with asyncio.timeout(WAIT_S):
        await answered.wait()
    assert (await ask(http, "POST", f"{path}/cancel"))["status"] == "cancelled"
    may_end.set()
    await eventually(lambda: not server.jobs._puller or not server.jobs._puller.running)
    assert server.jobs.store is not None
    assert await server.jobs.store.delete("anna", begun["id"].replace("resp_", "job-"))
    await ask(http, "GET", path, 404)
    await ask(http, "POST", PATH, 404, json={"input": "More.", "previous_response_id": begun["id"]})


async def test_a_response_is_as_old_as_its_job(
    http: aiohttp.ClientSession, server: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its states and its events state one time, however late it ran."""
    monkeypatch.setattr(server.jobs.store, "_now_s", lambda: time.time() - 1000)  # it waits since then
    begun = await ask(http, "POST", PATH, json=BODY)
    assert begun["created_at"] < time.time() - 900
    assert (await ended(http, begun))["created_at"] == begun["created_at"]
    read = await events(http, f"{PATH}/{begun['id']}?stream=true")
    stated = {event["response"]["created_at"] for event in read if "response" in event}
    assert stated == {begun["created_at"]}


async def test_a_response_that_cannot_run_has_failed(http: aiohttp.ClientSession) -> None:
    begun = await ask(http, "POST", PATH, json={**BODY, "input": "word " * 20_000})
    failed = await ended(http, begun)
    assert (failed["status"], failed["error"]["code"]) == ("failed", "invalid_prompt")
    assert "maximum context length" in failed["error"]["message"]


async def test_what_cannot_be_in_the_background_is_refused(
    http: aiohttp.ClientSession, cluster: FakeCluster, card: ModelCard
) -> None:
    direct = await ask(http, "POST", PATH, json={"input": "Hello."})
    for method, path, field in (
        ("POST", f"{PATH}/{direct['id']}/cancel", "response_id"),
        ("GET", f"{PATH}/{direct['id']}?stream=true", "stream"),
    ):
        assert (await ask(http, method, path, 400))["error"]["param"] == field
    for path, body in (
        (PATH, {**BODY, "store": False}),
        (PATH, {**BODY, "input": 5}),
        ("/client/v4/accounts/a/ai/v1/responses", BODY),
    ):
        await ask(http, "POST", path, 400, json=body)
    async with (
        open_router(cluster, card) as router,
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as other,
    ):
        assert (await ask(other, "POST", PATH, 400, json=BODY))["error"]["param"] == "background"


@pytest.mark.parametrize("keep_alive_s", [0.0, 10.0])
async def test_a_stream_ends_with_its_key(
    cluster: FakeCluster,
    card: ModelCard,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keep_alive_s: float,
) -> None:
    """Also while the response does not change."""
    monkeypatch.setattr("services.router.api.followers.KEY_CHECK_S", 0.02)
    database, keys = open_database(f"sqlite:{tmp_path}/test.db"), tenant_keys({"key-a": "anna"})
    async with (
        open_router(cluster, card, database=database, keys=keys) as router,
        aiohttp.ClientSession(f"http://{router.http_endpoint}", headers={"x-api-key": "key-a"}) as http,
    ):
        router._http.generation.keep_alive_s = keep_alive_s
        router.manager.drain()  # nothing is pulled
        async with (
            asyncio.timeout(WAIT_S),
            http.post(PATH, json={**BODY, "stream": True}) as answer,
        ):
            first = await answer.content.readuntil(b"\n\n")
            keys.replace([])
            seen = objects(first + await answer.content.read())
        assert seen[-1]["type"] == "error" and "revoked" in seen[-1]["message"]
    await database.close()


async def test_a_stream_that_is_refused_begins_nothing(
    http: aiohttp.ClientSession, server: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libs.common.service_bounds.MAX_TENANT_JOB_FOLLOWERS", 0)
    await ask(http, "POST", PATH, 429, json={**BODY, "stream": True})
    assert server.jobs.store is not None
    assert not await server.jobs.store.list_jobs("anna")


async def test_a_call_does_not_pass_for_a_job(http: aiohttp.ClientSession) -> None:
    """Else it would write the response of another call."""
    data, forged = rb'{"input": "Hello.", "\u0062ackground": true}', "job-" + "0" * 30
    headers = {"x-request-id": forged, "Content-Type": "application/json"}
    refused = await ask(http, "POST", PATH, 400, data=data, headers=headers)
    assert refused["error"]["param"] == "background"


async def test_long_bodies_are_read_off_the_event_loop(
    http: aiohttp.ClientSession, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for decode in cluster.decodes:
        decode.gate.clear()
    begun = await ask(http, "POST", PATH, json={**BODY, "user": "x" * 300_000})
    path, loop_thread, threads = f"{PATH}/{begun['id']}", threading.get_ident(), list[int]()
    for module, name in (("background", "decode_response"), ("stored.replay", "event_pieces")):
        original = getattr(importlib.import_module(f"services.router.api.responses.{module}"), name)

        def noted(*given: Any, original: Any = original) -> Any:
            threads.append(threading.get_ident())
            return original(*given)

        monkeypatch.setattr(f"services.router.api.responses.{module}.{name}", noted)
    await ask(http, "GET", path)
    for decode in cluster.decodes:
        decode.gate.set()
    await events(http, f"{path}?stream=true")
    assert threads and loop_thread not in threads

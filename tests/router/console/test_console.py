"""The console of a whole router: what it shows of requests that ran."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from libs.common.cluster.worker_record import Role, Worker
from services.router.server import RouterServer
from tests.router.conftest import HELLO, WAIT_S, eventually
from tests.router.support.fake_cluster import FakeCluster

Page = dict[str, Any]
POST = {"x-slipstream-console": "1"}


@pytest.fixture
async def console(router: RouterServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{router.admin_http_endpoint}") as http:
        yield http


async def read(http: aiohttp.ClientSession, path: str) -> Page:
    async with http.get(f"/console/api/{path}") as answer:
        assert answer.status == 200, await answer.text()
        page: Page = await answer.json()
        return page


async def chat(router: RouterServer, *, session: str = "s-1", **body: Any) -> str:
    """Run one chat over the public port, and return its id when the router has released it."""
    async with (
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
        http.post(
            "/v1/chat/completions",
            json={"messages": HELLO, "max_tokens": 8, **body},
            headers={"x-session-affinity": session},
        ) as answer,
    ):
        assert answer.status == 200, await answer.text()
        await answer.read()
        request_id = answer.headers["x-request-id"]
    await eventually(lambda: router.manager.held == 0)
    return request_id


async def test_a_request_shows_its_timeline_its_placement_and_its_tokens(
    router: RouterServer, console: aiohttp.ClientSession
) -> None:
    request_id = await chat(router)
    page = await read(console, f"requests/{request_id}")
    summary = page["summary"]
    assert summary["status"] == "succeeded" and summary["code"] is None
    assert summary["endpoint"] == "/v1/chat/completions" and not summary["streamed"]
    assert summary["session"] == "s-1" and summary["tenant"] == "default"
    assert page["tokens"]["count"][-1] == summary["output_tokens"] > 0
    kinds = [entry["kind"] for entry in page["timeline"]]
    assert kinds[:4] == ["received", "admitted", "encoded", "placed"] and kinds[-1] == "finished"
    assert {"prefill_started", "handoff", "first_token", "tokens"} <= set(kinds)
    at_ms = [entry["at_ms"] for entry in page["timeline"]]
    assert at_ms == sorted(at_ms) and at_ms[0] == 0.0
    (placement,) = page["placements"]
    assert placement["chosen"]["prefill"] == summary["prefill"] != ""
    assert placement["chosen"]["decode"] == summary["decode"] != ""
    chosen = {row["part"]: row for row in placement["candidates"] if row["chosen"]}
    assert {part: row["instance"] for part, row in chosen.items()} == {
        "prefill": summary["prefill"],
        "decode": summary["decode"],
    }
    assert len(placement["candidates"]) == placement["candidates_total"] == 6  # 2 of each part
    for row in placement["candidates"]:
        assert row["total_ms"] == pytest.approx(sum(row["terms"].values()), abs=0.01)


async def test_the_list_of_requests_is_paged_and_filtered(
    router: RouterServer, console: aiohttp.ClientSession
) -> None:
    for number in range(3):
        await chat(router, session=f"s-{number}")
    first = await read(console, "requests?limit=2")
    assert [row["seq"] for row in first["requests"]] == [3, 2]
    assert (first["next_before"], first["total"], first["dropped"]) == (2, 3, 0)
    rest = await read(console, "requests?limit=2&before=2")
    assert [row["seq"] for row in rest["requests"]] == [1] and rest["next_before"] is None
    assert [row["seq"] for row in (await read(console, "requests?session=s-1"))["requests"]] == [2]
    assert (await read(console, "requests?status=failed"))["requests"] == []
    for query, field in (("limit=0", "limit"), ("before=x", "before"), ("status=odd", "status")):
        async with console.get(f"/console/api/requests?{query}") as answer:
            assert answer.status == 400 and (await answer.json())["error"]["param"] == field


async def test_the_fleet_and_the_caches_have_every_worker_and_the_session(
    router: RouterServer, console: aiohttp.ClientSession
) -> None:
    await chat(router, session="s-9", messages=[{"role": "user", "content": "Where is my order? " * 30}])
    page = await read(console, "fleet")
    assert page["router"]["instance"] == "router-0" and page["router"]["processes"] == 1
    rows = {row["instance"]: row for row in page["workers"]}
    assert set(rows) == {"prefill-0", "prefill-1", "decode-0", "decode-1", "kvstore-0"}
    assert all(row["ready"] and not row["draining"] and row["degraded"] is None for row in rows.values())
    assert rows["decode-0"]["load"]["running_sequences"] == 0
    cache = await read(console, "cache")
    assert [tier["tier"] for tier in cache["tiers"]] == ["prefill", "decode", "memory", "pool", "disk"]
    assert cache["sessions"]["total"] == 1 and cache["sessions"]["page"][0]["session"] == "s-9"
    assert cache["prompt_tokens"] > 0


async def test_the_events_name_the_fleet_the_rates_and_each_request(
    router: RouterServer, console: aiohttp.ClientSession
) -> None:
    seen: dict[str, Any] = {}
    async with console.get("/console/api/events") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert router.console.events.readers == 1
        await chat(router)
        name = ""
        async for line in answer.content:
            if line.startswith(b"event: "):
                name = line[7:].strip().decode()
            elif line.startswith(b"data: "):
                seen[name] = json.loads(line[6:])
            if len(seen) == 4 and seen["request"][-1]["status"] == "succeeded":
                break
    assert {row["role"] for row in seen["fleet"]["workers"]} == {"prefill", "decode", "kvstore"}
    assert seen["rates"]["requests_per_s"] >= 0
    await eventually(lambda: router.console.events.readers == 0)


async def test_the_playground_runs_a_chat_completion_as_the_public_port_does(
    router: RouterServer, console: aiohttp.ClientSession
) -> None:
    body = {"messages": HELLO, "max_tokens": 4, "stream": True}
    async with console.post("/console/api/chat", json=body, headers=POST) as answer:
        assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
        assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        request_id = answer.headers["x-request-id"]
    page = await read(console, f"requests/{request_id}")
    assert page["summary"]["endpoint"] == "/console/api/chat" and page["summary"]["streamed"]


async def test_the_fleet_names_the_other_routers_and_the_processes_that_share_the_ports(
    router: RouterServer, cluster: FakeCluster, console: aiohttp.ClientSession
) -> None:
    for instance, endpoint in (("router-0.1", router.host.endpoint), ("router-1", "127.0.0.1:1")):
        cluster.discovery.announce(
            Worker(Role.ROUTER, instance, endpoint, "i", admin="127.0.0.1:2", admin_http="127.0.0.1:3")
        )
    await eventually(lambda: len(router.pipeline.members.current.with_role(Role.ROUTER)) == 3)
    page = await read(console, "fleet")
    assert (page["router"]["processes"], page["router"]["siblings"]) == (2, ["router-0.1"])
    rows = {row["instance"]: (row["own"], row["sibling"], row["admin_http"]) for row in page["routers"]}
    assert rows == {
        "router-0": (True, False, router.admin_http_endpoint),
        "router-0.1": (False, True, "127.0.0.1:3"),
        "router-1": (False, False, "127.0.0.1:3"),
    }


async def test_a_connection_that_does_not_read_is_aborted(
    router: RouterServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_pages = 0

    async def large_page() -> Page:  # asked for while a connection reads
        nonlocal n_pages
        n_pages += 1
        return {"text": "x" * 200_000}

    hub = router.console.events
    monkeypatch.setattr(router.console, "fleet", large_page)
    monkeypatch.setattr(hub, "_fleet_every_s", 0.001)
    host, port = router.admin_http_endpoint.split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    try:
        writer.write(b"GET /console/api/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await eventually(lambda: n_pages > 0 and hub.readers == 0)
        async with asyncio.timeout(WAIT_S):
            received = await reader.read(-1)
        assert b"event: fleet" in received and not received.endswith(b"0\r\n\r\n")  # cut off
    finally:
        writer.close()

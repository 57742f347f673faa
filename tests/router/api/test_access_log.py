"""The access log: its lines, and that every call over HTTP and gRPC has one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator

import aiohttp
import pytest

from services.router.api.access_log import AccessLog, LineWriter
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from tests.router.conftest import eventually, open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys

HELLO = [{"role": "user", "content": "a-secret-word " * 30}]
CHAT = "POST /v1/chat/completions"


class Lines:
    """The lines of a JSON log."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.log = AccessLog(self.texts.append, as_json=True, instance="router-0")

    def taken(self) -> list[dict[str, object]]:
        """The lines since the last call."""
        taken, self.texts[:] = [json.loads(text) for text in self.texts], []
        return taken


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
async def logging_router(cluster: FakeCluster, card: ModelCard, lines: Lines) -> AsyncIterator[RouterServer]:
    keys = tenant_keys({"sesame": "ali"})
    async with open_router(cluster, card, tenants=keys, access_log=lines.log) as router:
        yield router


@pytest.fixture
async def http(logging_router: RouterServer) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": "Bearer sesame", "x-request-id": "mine"}
    url = f"http://{logging_router.http_endpoint}"
    async with aiohttp.ClientSession(url, headers=headers) as session:
        yield session


async def test_each_http_call_has_one_line(http: aiohttp.ClientSession, lines: Lines) -> None:
    for stream in (False, True):
        body = {"messages": HELLO, "max_tokens": 5, "stream": stream, "ignore_eos": True}
        async with http.post("/v1/chat/completions", json=body) as answer:
            assert answer.status == 200
            await answer.read()
        await eventually(lambda: bool(lines.texts))
        assert "secret" not in lines.texts[0] and "sesame" not in lines.texts[0]
        (line,) = lines.taken()
        assert {name: line[name] for name in ("id", "api", "call", "tenant", "status")} == {
            **{"id": "mine", "api": "http", "call": CHAT, "tenant": "ali", "status": "200"}
        }
        assert line["completion_tokens"] == 5
        prompt, cached = line["prompt_tokens"], line["cached_tokens"]
        assert isinstance(prompt, int) and isinstance(cached, int) and prompt > cached
        assert (cached > 0) == stream  # the second prompt finds the blocks of the first one
        ms, ttft_ms = line["ms"], line["ttft_ms"]
        assert isinstance(ms, float) and isinstance(ttft_ms, float) and ms >= ttft_ms > 0


async def test_refused_http_calls_have_lines_and_good_probes_have_none(
    http: aiohttp.ClientSession, lines: Lines
) -> None:
    wrong = {"Authorization": "Bearer not-sesame"}
    async with http.post("/v1/chat/completions", json={"messages": HELLO}, headers=wrong):
        pass
    async with http.post("/v1/chat/completions", json={"messages": HELLO, "temperature": 9}):
        pass
    for path in ("/healthz/live", "/healthz/ready", "/a-secret-path"):
        async with http.get(path):
            pass
    assert [(line["call"], line["status"], line["error"]) for line in lines.taken()] == [
        (CHAT, "401", "Unauthenticated"),
        (CHAT, "400", "InvalidArgument"),
        ("GET -", "404", "HttpRefusal"),
    ]


async def test_a_client_that_leaves_has_a_line(
    http: aiohttp.ClientSession, lines: Lines, cluster: FakeCluster
) -> None:
    for worker in cluster.prefills:
        worker.gate.clear()
    timeout = aiohttp.ClientTimeout(total=0.3)
    with pytest.raises(TimeoutError):
        await http.post("/v1/chat/completions", json={"messages": HELLO}, timeout=timeout)
    await eventually(lambda: bool(lines.texts))
    (line,) = lines.taken()
    assert (line["status"], line["error"]) == ("499", "Aborted")


async def test_each_grpc_call_has_one_line(logging_router: RouterServer, lines: Lines) -> None:
    async with AsyncClient(logging_router.host.endpoint, api_key="sesame") as client:
        await client.chat(HELLO, max_tokens=5, request_id="mine")
        with pytest.raises(errors.InvalidArgument):
            await client.chat(HELLO, temperature=9)
        await client.models()
    async with AsyncClient(logging_router.host.endpoint, api_key="wrong") as client:
        with pytest.raises(errors.Unauthenticated):
            await client.chat(HELLO)
        with pytest.raises(errors.Unauthenticated):
            await client.models()
    await eventually(lambda: len(lines.texts) >= 5)
    found = lines.taken()
    assert [(line["call"], line["tenant"], line["status"]) for line in found] == [
        ("Generate", "ali", "OK"),
        ("Generate", "ali", "INVALID_ARGUMENT"),
        ("ListModels", "ali", "OK"),
        ("Generate", "", "UNAUTHENTICATED"),
        ("ListModels", "", "UNAUTHENTICATED"),
    ]
    assert (found[0]["id"], found[0]["completion_tokens"]) == ("mine", 5)
    assert all(line["id"] for line in found)


def test_a_text_line_holds_the_same_fields() -> None:
    texts: list[str] = []
    times = iter([1.0, 1.25])
    log = AccessLog(texts.append, instance="r", clock=lambda: next(times), wall_clock_s=lambda: 0.5)
    with log.call("http", CHAT) as record:
        record.request_id, record.status = "mine", "200"
    (text,) = texts
    at, _, shown = text.partition(" INFO r access: ")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,500", at)
    assert shown == f'id=mine api=http call="{CHAT}" tenant=- status=200 ms=250.0'


def test_a_full_pipe_costs_lines_and_no_time(caplog: pytest.LogCaptureFixture) -> None:
    reading, writing = os.pipe()
    try:
        writer, line = LineWriter(writing), "x" * 99
        for _ in range(2000):  # 200 kB, more than a pipe holds; a blocking write would end here
            writer.write(line)
        held = os.read(reading, 1 << 20)
        assert len(held) % 100 == 0 and 0 < len(held) < 200_000
        writer.write(line)
        assert os.read(reading, 1 << 20) == b"x" * 99 + b"\n"
        missing = 2000 - len(held) // 100
        assert caplog.messages == [f"{missing} access lines are missing: stderr had no room"]
    finally:
        os.close(reading)
        os.close(writing)


def test_a_log_that_is_off_writes_nothing() -> None:
    with AccessLog().call("grpc", "Generate") as record:
        record.status = "OK"

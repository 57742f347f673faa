"""The access log: its lines, and that every call over HTTP and gRPC has one."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import pytest

from libs.common.telemetry.logs import LogFormatter
from services.router.api.access_log import AccessLog, LineWriter
from services.router.api.api_keys import ApiKeys
from services.router.execution.generation import GenerationTask
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream import errors
from slipstream.async_client import AsyncClient
from slipstream.credentials.api_key_file import KEY_PREFIX, KeyRecord, KeyScope, key_hash
from slipstream.logs.lines import LineFormat
from slipstream.rpc.cluster_secret import ClusterSecret
from tests.router.conftest import eventually, open_router
from tests.router.support.fake_cluster import FakeCluster

HELLO = [{"role": "user", "content": "a-secret-word " * 30}]
CHAT = "POST /v1/chat/completions"
NAME = "ali-laptop"  # of the key "sesame"


class Lines:
    """The lines of a JSON log."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.log = AccessLog(self.texts.append, LineFormat("router", "router-0", is_json=True))

    def taken(self) -> list[dict[str, object]]:
        """The lines since the last call."""
        taken, self.texts[:] = [json.loads(text) for text in self.texts], []
        return taken


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
async def logging_router(cluster: FakeCluster, card: ModelCard, lines: Lines) -> AsyncIterator[RouterServer]:
    keys = ApiKeys([KeyRecord(NAME, "ali", KeyScope.TENANT, key_hash("sesame"))])
    async with open_router(cluster, card, keys=keys, access_log=lines.log) as router:
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
        assert {name: line[name] for name in ("request_id", "api", "message", "status")} == {
            **{"request_id": "mine", "api": "http", "message": CHAT, "status": "200"}
        }
        assert (line["tenant"], line["key_name"]) == ("ali", NAME)
        assert (line["service"], line["instance"], line["logger"], line["level"]) == (
            *("router", "router-0", "access", "info"),
        )
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
    page = {"Origin": "https://page.example"}
    for method, path, headers in (
        ("POST", "/v1/chat/completions", page),
        ("POST", "/v1/chat/completions", {"Content-Type": "text/plain"}),
        ("OPTIONS", "/v1/chat/completions", page),
        ("DELETE", "/v1/models/slipstream-mini", {}),
        ("POST", "/v1/chat/completions", {"Expect": "a-secret"}),
    ):
        async with http.request(method, path, data=b"{}", headers=headers):
            pass
    assert [(line["message"], line["status"], line["error"]) for line in lines.taken()] == [
        (CHAT, "401", "Unauthenticated"),
        (CHAT, "400", "InvalidArgument"),
        ("GET -", "404", "unknown_url"),
        (CHAT, "403", "origin_not_allowed"),
        (CHAT, "415", "unsupported_content_type"),
        ("OPTIONS /v1/chat/completions", "403", "origin_not_allowed"),
        ("DELETE /v1/models/{name}", "405", "method_not_allowed"),
        ("POST -", "417", "expectation_failed"),
    ]


@pytest.mark.parametrize("n", [1, 2])
async def test_a_request_that_does_not_begin_has_no_tokens(
    http: aiohttp.ClientSession, lines: Lines, n: int
) -> None:
    async with http.post("/v1/chat/completions", json={"messages": HELLO, "n": n, "max_tokens": 10**6}):
        pass
    (line,) = lines.taken()
    assert (line["status"], line["error"]) == ("400", "ContextExceeded")
    assert not {"prompt_tokens", "cached_tokens", "completion_tokens", "ttft_ms"} & line.keys()


async def test_other_lines_of_a_request_name_it_too(
    http: aiohttp.ClientSession, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    secret = "-".join(("sk", "1"))  # the source lines of a traceback do not have it
    formatter = LogFormatter(LineFormat("router", "router-0"))

    class Remembering(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(formatter.format(record))

    def fail(*_: object) -> None:
        raise RuntimeError(secret)

    monkeypatch.setattr(GenerationTask, "run", fail)
    monkeypatch.setattr(logging.getLogger(), "handlers", [Remembering()])
    async with http.post("/v1/chat/completions", json={"messages": HELLO}) as answer:
        assert answer.status == 500
    (line,) = told
    assert " request mine failed request_id=mine\n" in line and secret not in line


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
    assert [(line["message"], line["tenant"], line["key_name"], line["status"]) for line in found] == [
        ("Generate", "ali", NAME, "OK"),
        ("Generate", "ali", NAME, "INVALID_ARGUMENT"),
        ("ListModels", "ali", NAME, "OK"),
        ("Generate", "", "", "UNAUTHENTICATED"),
        ("ListModels", "", "", "UNAUTHENTICATED"),
    ]
    assert (found[0]["request_id"], found[0]["completion_tokens"]) == ("mine", 5)
    assert all(line["request_id"] for line in found)


async def test_a_grpc_message_that_does_not_parse_has_a_line(
    logging_router: RouterServer, lines: Lines
) -> None:
    metadata = (("authorization", "Bearer sesame"), ("x-request-id", "mine"))
    async with grpc.aio.insecure_channel(logging_router.host.endpoint) as channel:
        for name in ("ListModels", "Tokenize", "Generate"):
            call: Any = channel.unary_unary(f"/slipstream.v1.RouterService/{name}")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(b"\xff", metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await eventually(lambda: len(lines.texts) >= 3)
    fields = ("message", "request_id", "tenant", "key_name", "status", "error")
    assert [tuple(line[field] for field in fields) for line in lines.taken()] == [
        (name, "mine", "ali", NAME, "INVALID_ARGUMENT", "InvalidArgument")
        for name in ("ListModels", "Tokenize", "Generate")
    ]


async def test_a_key_that_is_given_as_an_id_is_not_logged(http: aiohttp.ClientSession, lines: Lines) -> None:
    key = KEY_PREFIX + "0" * 40
    async with http.get("/v1/models", headers={"x-request-id": key}) as answer:
        assert answer.headers["x-request-id"] != key
    (line,) = lines.taken()
    assert key not in json.dumps(line)


def test_a_text_line_holds_the_same_fields() -> None:
    texts: list[str] = []
    times = iter([1.0, 1.25])
    lines = LineFormat("router", "r")
    log = AccessLog(texts.append, lines, clock=lambda: next(times), wall_clock_s=lambda: 0.5)
    with log.call("http", CHAT) as record:
        record.request_id, record.status = "mine", "200"
    (text,) = texts
    shown = f"{CHAT} request_id=mine api=http tenant=- key_name=- status=200 ms=250.0"
    assert text == f"1970-01-01T00:00:00.500Z INFO router/r access: {shown}"


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


async def test_a_method_that_does_not_exist_is_not_named(
    cluster: FakeCluster, card: ModelCard, lines: Lines
) -> None:
    secret = ClusterSecret(b"0123456789abcdef")
    async with (
        open_router(cluster, card, secret=secret, access_log=lines.log) as router,
        grpc.aio.insecure_channel(router.host.endpoint) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/slipstream.v1.RouterService/a-secret-word")(b"")  # type: ignore[arg-type]
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    (line,) = lines.taken()
    assert (line["message"], line["status"]) == ("-", "UNIMPLEMENTED")


def test_a_log_that_is_off_writes_nothing() -> None:
    with AccessLog().call("grpc", "Generate") as record:
        record.status = "OK"

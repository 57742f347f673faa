"""What every HTTP answer of a router has: an id, an error in OpenAI's shape, and no page's permission."""

from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from tests.router.conftest import open_router
from tests.router.support.fake_cluster import FakeCluster
from tests.support.api_keys import tenant_keys

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Where is my order?"}], "max_tokens": 4}
PAGE = "https://ui.example"


@pytest.fixture
async def http(router: RouterServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(f"http://{router.http_endpoint}") as session:
        yield session


async def test_every_answer_has_a_request_id_and_no_version(http: aiohttp.ClientSession) -> None:
    calls: list[tuple[str, str, object]] = [
        ("GET", "/v1/nothing", None),
        ("GET", "/healthz/live", None),
        ("DELETE", CHAT, None),
    ]
    calls += [("POST", CHAT, {**BODY, "temperature": 9}), ("POST", CHAT, BODY), ("GET", "/v1/models", None)]
    seen = set()
    for method, path, body in calls:
        for given in ("", "mine-1", "bad id"):
            headers = {"x-request-id": given} if given else {}
            async with http.request(method, path, json=body, headers=headers) as answer:
                request_id = answer.headers["x-request-id"]
                assert answer.headers.getall("Server") == ["slipstream"]
            assert (request_id == given) == (given == "mine-1")
            seen.add(request_id)
    assert len(seen) == 2 * len(calls) + 1


async def test_the_id_of_the_body_goes_before_the_header_also_on_an_error(
    http: aiohttp.ClientSession,
) -> None:
    headers = {"x-request-id": "of-the-header"}
    for more, status in (({}, 200), ({"temperature": 9}, 400)):
        async with http.post(
            CHAT, json={**BODY, **more, "request_id": "of-the-body"}, headers=headers
        ) as answer:
            assert (answer.status, answer.headers["x-request-id"]) == (status, "of-the-body")


async def test_an_invalid_id_of_the_header_is_refused_by_the_headers_name(
    http: aiohttp.ClientSession,
) -> None:
    async with http.post(CHAT, json=BODY, headers={"x-request-id": "bad id"}) as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["param"]) == (400, "x-request-id")
    assert error["message"].startswith("x-request-id: must be 1 to 128 characters")
    async with http.post(CHAT, json={**BODY, "request_id": "bad id"}) as answer:
        assert (await answer.json())["error"]["param"] == "request_id"


async def test_refusals_of_every_kind_have_an_id(cluster: FakeCluster, card: ModelCard) -> None:
    async with (
        open_router(cluster, card, keys=tenant_keys({"sesame": "ali"})) as router,
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
    ):
        async with http.post(CHAT, json=BODY, headers={"x-request-id": "mine"}) as answer:
            assert (answer.status, answer.headers["x-request-id"]) == (401, "mine")
        router.manager.drain()
        headers = {"x-request-id": "mine", "Authorization": "Bearer sesame"}
        async with http.post(CHAT, json=BODY, headers=headers) as answer:
            assert (answer.status, answer.headers["x-request-id"]) == (503, "mine")


async def test_a_path_that_does_not_exist_is_named_with_those_that_do(http: aiohttp.ClientSession) -> None:
    async with http.get("/v1/nothing") as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (404, "unknown_url")
    assert error["message"] == "GET '/v1/nothing' does not exist; there is /v1/completions"
    async with http.get("/zzzz") as answer:
        message = (await answer.json())["error"]["message"]
    assert message == "GET '/zzzz' does not exist; there is /openapi.json, which lists all paths"
    async with http.post("/chat/completions", json=BODY) as answer:
        message = (await answer.json())["error"]["message"]
    assert message == (
        "POST '/chat/completions' does not exist, /v1/chat/completions does: "
        "the base URL of the API ends with /v1"
    )
    async with http.post("/v1/v1/messages", json=BODY) as answer:
        assert answer.status == 404
        assert "/v1 is there twice" in (await answer.json())["error"]["message"]


async def test_a_page_cannot_send_a_request_nor_read_an_answer(
    http: aiohttp.ClientSession, router: RouterServer, cluster: FakeCluster
) -> None:
    """Findings A10: text/plain from a page, a rebound name, and both at once."""
    plain, json_body = {"Content-Type": "text/plain"}, {"Content-Type": "application/json"}
    attacks = [
        (415, plain),
        (415, {"Content-Type": "application/x-www-form-urlencoded"}),
        (403, {**plain, "Origin": "https://evil.example"}),
        (403, {**json_body, "Origin": "https://evil.example"}),
        (403, {**json_body, "Host": "evil.example"}),
        (403, {**json_body, "Host": "evil.example:8000", "Origin": "http://evil.example:8000"}),
    ]
    data = b'{"messages": [{"role": "user", "content": "hi"}]}'
    for status, headers in attacks:
        async with http.post(CHAT, data=data, headers=headers) as answer:
            assert answer.status == status, headers
            assert (await answer.json())["error"]["code"]
            assert not [name for name in answer.headers if name.startswith("Access-Control")]
    async with http.post(CHAT, data=data, skip_auto_headers=["Content-Type"]) as answer:
        assert answer.status == 415
    async with http.get("/v1/models", headers={"Host": "evil.example"}) as answer:
        assert answer.status == 403
    async with http.options(
        CHAT, headers={"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    ) as answer:
        assert answer.status == 403
    assert router.counters.snapshot().get("slipstream_requests_total", 0) == 0


async def test_an_unknown_encoding_is_refused(http: aiohttp.ClientSession) -> None:
    for encoding in ("br", "foo"):
        headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
        async with http.post(CHAT, data=b"{}", headers=headers) as answer:
            assert answer.status == 415, encoding


async def test_a_listed_page_may_call(cluster: FakeCluster, card: ModelCard) -> None:
    async with (
        open_router(cluster, card, cors_origins=[PAGE], allowed_hosts=["chat.example.com"]) as router,
        aiohttp.ClientSession(f"http://{router.http_endpoint}") as http,
    ):
        asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        async with http.options(CHAT, headers={"Origin": PAGE, **asks}) as answer:
            assert answer.status == 204
            assert answer.headers["Access-Control-Allow-Origin"] == PAGE
            assert answer.headers["Access-Control-Allow-Headers"] == "authorization"
            assert "POST" in answer.headers["Access-Control-Allow-Methods"]
        for stream in (False, True):
            headers = {"Origin": PAGE, "Host": "chat.example.com"}
            async with http.post(CHAT, json={**BODY, "stream": stream}, headers=headers) as answer:
                assert answer.status == 200
                assert answer.headers["Access-Control-Allow-Origin"] == PAGE
                exposed = answer.headers["Access-Control-Expose-Headers"].split(", ")
                assert {"x-request-id", "x-ratelimit-remaining-requests"} < set(exposed)
                assert "anthropic-ratelimit-tokens-reset" in exposed
                await answer.read()
        async with http.get("/v1/nothing", headers={"Origin": PAGE}) as answer:  # errors are read too
            assert answer.headers["Access-Control-Allow-Origin"] == PAGE

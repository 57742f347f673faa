"""Who may read and change by the console, and which pages may not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from libs.common.rpc.access_table import HTTP_ROUTER_CLASSES
from services.router.api.api_keys import ApiKeys
from services.router.console.page_guard import SECURITY_HEADERS
from services.router.console.static_files import StaticFiles, read_files
from services.router.request.model_card import ModelCard
from services.router.server import RouterServer
from slipstream.credentials.api_key_file import KeyRecord, KeyScope, key_hash
from slipstream.errors import NotFound
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.console_key import console_key
from slipstream.rpc.peer_token import TokenMinter
from slipstream.rpc.scrape_token import scrape_token
from tests.router.conftest import HELLO, open_router
from tests.router.support.fake_cluster import FakeCluster

SECRET = ClusterSecret(b"the secret of this cluster")
POST = {"x-slipstream-console": "1"}
DRAIN = "/console/api/workers/decode/decode-0/drain"
UNDRAIN = "/console/api/workers/decode/decode-0/undrain"
CHAT = "/console/api/chat"
BODY = {"messages": HELLO, "max_tokens": 2}
READS = [
    route.removeprefix("GET ").format(id="x")
    for route in HTTP_ROUTER_CLASSES
    if route.startswith("GET /console/api") and "events" not in route
]


def two_keys() -> ApiKeys:
    scopes = (("key-t", "anna", KeyScope.TENANT), ("key-o", "ops", KeyScope.OPERATOR))
    return ApiKeys(KeyRecord(key, tenant, scope, key_hash(key)) for key, tenant, scope in scopes)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def token(router: RouterServer, kind: CallerClass) -> dict[str, str]:
    return dict(TokenMinter(SECRET, "someone", kind).tokens_for(router.admin_http_endpoint).metadata())


@asynccontextmanager
async def console_of(
    cluster: FakeCluster, card: ModelCard, **options: Any
) -> AsyncIterator[tuple[RouterServer, aiohttp.ClientSession]]:
    async with (
        open_router(cluster, card, **options) as router,
        aiohttp.ClientSession(f"http://{router.admin_http_endpoint}") as http,
    ):
        yield router, http


async def post(
    http: aiohttp.ClientSession, path: str, body: Any, headers: Mapping[str, str] = POST
) -> tuple[int, str | None]:
    async with http.post(path, json=body, headers=headers) as answer:
        await answer.read()
        error = (await answer.json())["error"] if answer.status >= 400 else {}
        return answer.status, error.get("code")


async def test_pages_of_other_origins_neither_read_nor_change(cluster: FakeCluster, card: ModelCard) -> None:
    async with console_of(cluster, card) as (router, http):
        own = f"http://{router.admin_http_endpoint}"
        port = router.admin_http_endpoint.rpartition(":")[2]
        refused = {
            "foreign origin": {"Origin": "https://evil.example"},
            "no origin": {"Origin": "null"},
            "another port": {"Origin": "http://127.0.0.1:1"},
            "a longer name": {"Origin": f"{own}.evil.example"},
            "rebound name": {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"},
            "rebound name without origin": {"Host": f"evil.example:{port}"},
            "image of a page": {"Sec-Fetch-Site": "cross-site"},
            "another port's page": {"Sec-Fetch-Site": "same-site"},
        }
        for name, headers in refused.items():
            for path in READS:
                async with http.get(path, headers=headers) as answer:
                    assert answer.status == 403, (name, path)
            for path, body in ((DRAIN, {}), (CHAT, BODY)):
                status, _ = await post(http, path, body, {**POST, **headers})
                assert status == 403, (name, path)
        assert not cluster.decodes[0].service.draining and router.manager.context.recorder.began == 0
        for headers in ({}, {"Origin": own}, {"Origin": own, "Sec-Fetch-Site": "same-origin"}):
            for path in READS:
                async with http.get(path, headers=headers) as answer:
                    assert answer.status in (200, 404), path
            assert await post(http, UNDRAIN, {}, {**POST, **headers}) == (200, None)


async def test_a_change_needs_the_header_and_json(cluster: FakeCluster, card: ModelCard) -> None:
    async with console_of(cluster, card) as (_, http):
        for path, body in ((DRAIN, {}), (CHAT, BODY)):
            assert await post(http, path, body, {}) == (403, "console_header_missing")
            assert (await post(http, path, body, {"x-slipstream-console": "0"}))[0] == 403
            async with http.post(path, data=b"{}", headers={**POST, "Content-Type": "text/plain"}) as answer:
                assert answer.status == 415
            async with http.get(path) as answer:
                assert (answer.status, answer.headers["Allow"]) == (405, "POST")
        async with http.options(DRAIN, headers={"Origin": "https://evil.example"}) as answer:
            assert answer.status == 403  # a preflight request gets no permission
        assert (await post(http, DRAIN, {"now": True}))[0] == 400
        assert not cluster.decodes[0].service.draining


@pytest.mark.parametrize("has_secret", [True, False])
async def test_on_loopback_all_read_and_operators_change(
    cluster: FakeCluster, card: ModelCard, has_secret: bool
) -> None:
    secret = SECRET if has_secret else None
    async with console_of(cluster, card, secret=secret, keys=two_keys()) as (router, http):
        for path in READS:
            async with http.get(path) as answer:
                assert answer.status in (200, 404), path
        peer, operator = (token(router, kind) for kind in (CallerClass.PEER, CallerClass.OPERATOR))
        # Without a secret a token is no credential, and nothing admits who has no key.
        by_drain = {
            "nobody": ({}, 401),
            "wrong key": (bearer("key-x"), 401),
            "scrape token": (bearer(scrape_token(SECRET)), 401),
            "tenant": (bearer("key-t"), 403),
            "peer": (peer, 403 if has_secret else 401),
            "operator": (bearer("key-o"), 200),
            "operator's token": (operator, 200 if has_secret else 401),
            "console key": (bearer(console_key(SECRET)), 200 if has_secret else 401),
        }
        for name, (headers, status) in by_drain.items():
            assert (await post(http, UNDRAIN, {}, {**POST, **headers}))[0] == status, name
        by_chat = {
            "nobody": ({}, 401, ""),
            "tenant": (bearer("key-t"), 200, "anna"),
            "operator": (bearer("key-o"), 200, "ops"),
            "peer": (peer, 403 if has_secret else 401, ""),
        }
        for name, (headers, status, tenant) in by_chat.items():
            assert (await post(http, CHAT, BODY, {**POST, **headers}))[0] == status, name
            if tenant:
                newest = next(router.recorder.newest_first())
                assert newest.tenant == tenant


async def test_with_a_secret_and_no_keys_the_console_key_drains_and_anyone_chats(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with console_of(cluster, card, secret=SECRET) as (router, http):
        assert (await post(http, DRAIN, {}))[0] == 401
        assert (await post(http, CHAT, BODY))[0] == 200  # as over the public port
        key = {**POST, **bearer(console_key(SECRET))}
        assert (await post(http, DRAIN, {}, key))[0] == 200
        assert cluster.decodes[0].service.draining
        async with http.get("/metrics", headers=bearer(console_key(ClusterSecret(b"x" * 32)))) as answer:
            assert answer.status == 200  # on loopback everyone reads
        assert next(router.recorder.newest_first()).tenant == "default"


async def test_every_answer_of_the_console_has_the_security_headers(
    cluster: FakeCluster, card: ModelCard
) -> None:
    async with console_of(cluster, card, secret=SECRET) as (_, http):
        asked = [*READS, "/console", "/console/nothing", "/console/static/none.js", DRAIN]
        for path in asked:
            async with http.get(path, allow_redirects=False) as answer:
                found = {name: answer.headers.get(name) for name in SECURITY_HEADERS}
                assert found == SECURITY_HEADERS, path
                assert "Cache-Control" in answer.headers
        async with http.post(DRAIN, json={}) as answer:
            assert answer.status == 401 and answer.headers["Content-Security-Policy"].startswith(
                "default-src 'none'; script-src 'self';"
            )
        async with http.get("/healthz/live") as answer:
            assert "Content-Security-Policy" not in answer.headers


def test_static_files_have_types_and_versions_and_no_way_out(tmp_path: Path) -> None:
    folder = tmp_path / "static"
    (folder / "lib").mkdir(parents=True)
    (folder / "index.html").write_text("<p>")
    (folder / "lib" / "a.js").write_text("export {}")
    (folder / ".hidden").write_text("secret")
    (tmp_path / "outside").write_text("secret")
    (folder / "link.js").symlink_to(tmp_path / "outside")
    files = StaticFiles(folder)
    assert set(read_files(folder)) == {"index.html", "lib/a.js"}
    answer = files.answer("lib/a.js", {})
    assert answer.headers["Content-Type"] == "text/javascript; charset=utf-8"
    again = files.answer("lib/a.js", {"If-None-Match": f'"x", {answer.headers["ETag"]}'})
    assert (again.status, again.body) == (304, None)
    for path in ("../outside", "link.js", ".hidden", "lib/../index.html", "/etc/passwd", "lib", ""):
        with pytest.raises(NotFound):
            files.answer(path, {})

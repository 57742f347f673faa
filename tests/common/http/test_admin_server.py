"""The admin port of every service: health, its own metrics, and who may read them where."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from libs.common.http.admin_port import AdminPort, open_admin_port
from libs.common.http.admin_server import AdminServer, serve_admin
from libs.common.http.listening import listen_tcp
from libs.common.rpc.access import AccessControl
from libs.common.rpc.access_table import HTTP_SERVICE_CLASSES
from libs.common.runtime.readiness import DRAINING, LOADING, READY, UNANNOUNCED, ProcessHealth, loading
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.process_metrics import ProcessMetrics
from slipstream.errors import InvalidArgument, PermissionDenied, Unauthenticated, Unavailable
from slipstream.rpc.caller_class import CallerClass
from slipstream.rpc.cluster_secret import ClusterSecret
from slipstream.rpc.peer_token import TokenMinter
from slipstream.rpc.scrape_token import scrape_token
from tests.support.api_keys import tenant_keys

SECRET = ClusterSecret(b"the secret of this cluster")
NAME = "decode-0.example:9090"


def metrics() -> ProcessMetrics:
    return ProcessMetrics("decode", Counters(), lambda _: {"slipstream_requests_running": 3})


@asynccontextmanager
async def serving(
    port: AdminPort, health: ProcessHealth | None = None
) -> AsyncIterator[aiohttp.ClientSession]:
    health = health or ProcessHealth()
    async with (
        serve_admin(port, metrics=metrics(), read_health=health.read),
        aiohttp.ClientSession(f"http://{port.endpoint}") as http,
    ):
        yield http


def beyond_loopback() -> AdminPort:
    """A port with the rules of one on another address."""
    access = AccessControl(secret=SECRET)
    access.answer_to("0.0.0.0:9090", [NAME])
    return AdminPort(listen_tcp("127.0.0.1:0"), access, scrape_token(SECRET))


async def test_readiness_follows_the_life_of_the_process() -> None:
    health = ProcessHealth()
    async with serving(open_admin_port("127.0.0.1:0", secret=None), health) as http:
        for state, status in ((LOADING, 503), (UNANNOUNCED, 503), (READY, 200), (DRAINING, 503)):
            health.state = state
            async with http.get("/healthz/started") as answer:
                assert answer.status == (503 if state is LOADING else 200)
            async with http.get("/healthz/ready") as answer:
                assert answer.status == status
                assert await answer.json() == {"status": state.status, "message": state.message}
            async with http.get("/healthz/live") as answer:
                assert (answer.status, answer.headers["Server"]) == (200, "slipstream")


async def test_a_process_that_loads_says_how_far_it_is() -> None:
    read_bytes = 0
    health = ProcessHealth(lambda: loading(read_bytes, 2_000_000_000))
    async with serving(open_admin_port("127.0.0.1:0", secret=None), health) as http:
        for read_bytes, message in (
            (860_000_000, "loading weights: 43 %, 0.86 of 2.00 GB"),
            (2_000_000_000, LOADING.message),
        ):
            async with http.get("/healthz/ready") as answer:
                page = await answer.json()
            assert (answer.status, page["status"], page["message"]) == (503, "loading", message)
            assert page.get("loaded_bytes", read_bytes) == read_bytes
        health.state = READY
        async with http.get("/healthz/ready") as answer:
            assert answer.status == 200


async def test_metrics_are_measured_when_they_are_read() -> None:
    async with serving(open_admin_port("127.0.0.1:0", secret=SECRET)) as http:
        async with http.get("/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            text = await answer.text()
        assert "\nslipstream_requests_running 3.0\n" in text
        assert 'slipstream_build_info{python="' in text
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        async with http.get("/metrics", headers=accept) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert (await answer.text()).endswith("# EOF\n")


async def test_a_page_of_another_name_or_origin_reads_nothing() -> None:
    async with serving(open_admin_port("127.0.0.1:0", secret=None)) as http:
        for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
            async with http.get("/metrics", headers=headers) as answer:
                assert answer.status == 403
        async with http.post("/metrics") as answer:
            assert (answer.status, answer.headers["Allow"]) == (405, "GET")
        async with http.get("/healthz") as answer:  # a router's
            assert answer.status == 404


@pytest.mark.parametrize(
    ("advertise", "name"), [("", "decode-0.example"), ("metrics.example:0", "metrics.example")]
)
async def test_a_token_for_the_advertised_address_counts_and_none_for_another(
    advertise: str, name: str
) -> None:
    port = open_admin_port(
        "0.0.0.0:0", secret=SECRET, advertised="decode-0.example:7000", advertise=advertise
    )
    number = port.endpoint.rpartition(":")[2]
    assert port.advertised == f"{name}:{number}"
    minter = TokenMinter(SECRET, "someone", CallerClass.OPERATOR)
    async with serving(port) as http:
        for host in ("decode-0.example", "metrics.example"):
            headers = dict(minter.tokens_for(f"{host}:{number}").metadata())
            async with http.get("/metrics", headers=headers) as answer:
                assert answer.status == (200 if host == name else 401)


async def test_a_loopback_port_behind_a_proxy_serves_its_advertised_name() -> None:
    port = open_admin_port("127.0.0.1:0", secret=None, advertise="metrics.example:9090")
    assert port.advertised == "metrics.example:9090"
    async with serving(port) as http:
        for host, status in (("metrics.example:9090", 200), ("evil.example:9090", 403)):
            async with http.get("/metrics", headers={"Host": host}) as answer:
                assert answer.status == status


@pytest.mark.parametrize("kind", [None, CallerClass.PEER, CallerClass.OPERATOR])
async def test_beyond_loopback_metrics_need_an_operator(kind: CallerClass | None) -> None:
    headers = {} if kind is None else dict(TokenMinter(SECRET, "someone", kind).tokens_for(NAME).metadata())
    refused = 401 if kind is None else 403
    async with serving(beyond_loopback()) as http:
        for route, needed in HTTP_SERVICE_CLASSES.items():
            async with http.get(route.removeprefix("GET "), headers=headers) as answer:
                admitted = needed.admits(kind or CallerClass.PUBLIC)
                assert answer.status in ((200, 503) if admitted else (refused,)), route


async def test_the_scrape_token_opens_the_metrics_and_nothing_else() -> None:
    token = scrape_token(SECRET)
    assert token != scrape_token(ClusterSecret(b"another secret of a cluster"))
    port = beyond_loopback()
    async with serving(port) as http:
        for value, status in ((token, 200), (token[:-1], 401), ("", 401)):
            async with http.get("/metrics", headers={"Authorization": f"Bearer {value}"}) as answer:
                assert answer.status == status
    with pytest.raises(Exception, match="operator"):
        port.admit("GET /healthz", {"Authorization": f"Bearer {token}"})


def test_an_open_port_must_be_on_loopback() -> None:
    with pytest.raises(InvalidArgument, match=r"--admin-http: .* needs --cluster-secret-file$"):
        open_admin_port("0.0.0.0:0", secret=None)
    port = open_admin_port("0.0.0.0:0", secret=SECRET)
    assert port.access is not None
    with pytest.raises(Unavailable):
        open_admin_port(port.endpoint, secret=SECRET)
    port.listening.close()


def test_keys_without_a_secret_close_a_port_beyond_loopback() -> None:
    port = open_admin_port("0.0.0.0:0", secret=None, keys=tenant_keys({"key-a": "anna"}))
    with pytest.raises(Unauthenticated):
        port.admit("GET /metrics", {})
    with pytest.raises(PermissionDenied):
        port.admit("GET /metrics", {"Authorization": "Bearer key-a"})
    port.listening.close()


@pytest.mark.parametrize("route", ["GET /console/api/fleet", "POST /console/api/chat"])
def test_a_refusal_says_how_http_sends_a_key(route: str) -> None:
    port = open_admin_port("0.0.0.0:0", secret=None, keys=tenant_keys({"key-a": "anna"}))
    with pytest.raises(Unauthenticated) as refused:
        port.admit(route, {})
    assert "as `Authorization: Bearer KEY`" in str(refused.value)
    assert "metadata" not in str(refused.value) and "SDK" not in str(refused.value)  # hints for gRPC
    port.listening.close()


async def test_the_routes_are_those_of_the_table() -> None:
    port = open_admin_port("127.0.0.1:0", secret=None)
    server = AdminServer(port, metrics=metrics(), read_health=ProcessHealth().read)
    routes = {
        f"{route.method} {route.resource.canonical}"
        for route in server.application.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert routes == set(HTTP_SERVICE_CLASSES)
    port.listening.close()


def test_a_process_that_captures_says_how_far_it_is() -> None:
    state = loading(9, 9, done_captures=3, total_captures=46)
    assert (state.status, state.serves) == ("loading", False)
    assert state.message == "capturing decode steps: 3 of 46 buckets"
    assert state.figures == {"done_captures": 3, "total_captures": 46}
    assert loading(9, 9, done_captures=46, total_captures=46) is LOADING

"""Which requests a guard lets through, by their headers."""

from __future__ import annotations

import pytest

from libs.common.http.failure import HttpRefusal
from libs.common.http.guard import HttpGuard, check_body

LOOPBACK, EVERYWHERE = "127.0.0.1:8000", "0.0.0.0:8000"


def guard(
    endpoint: str = LOOPBACK, *, hosts: tuple[str, ...] = (), origins: tuple[str, ...] = ()
) -> HttpGuard:
    return HttpGuard.of(endpoint, allowed_hosts=hosts, cors_origins=origins)


def code_of(rules: HttpGuard, **headers: str) -> str | None:
    try:
        rules.check({name.capitalize(): value for name, value in headers.items()})
    except HttpRefusal as refusal:
        return refusal.code
    return None


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LOCALHOST", "chat.localhost", "127.0.0.1", "127.0.0.1:8000"),
        *("[::1]", "[::1]:8000", "10.1.2.3:8000", ""),  # an address is no name that a DNS server could turn
    ],
)
def test_a_loopback_listener_takes_addresses_and_localhost(host: str) -> None:
    assert code_of(guard(), host=host) is None
    assert code_of(guard("localhost:1"), host=host) is None


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "evillocalhost",
        "[::1]evil.example",
    ],
)
def test_a_rebound_name_is_refused_on_loopback(host: str) -> None:
    assert code_of(guard(), host=host) == "host_not_allowed"
    with pytest.raises(HttpRefusal, match="set the router's --allowed-hosts to the name that clients dial"):
        guard().check({"Host": host})


def test_other_listeners_take_every_name_until_they_have_a_list() -> None:
    assert code_of(guard(EVERYWHERE), host="chat.example.com") is None
    listed = guard(EVERYWHERE, hosts=("chat.example.com",))
    assert code_of(listed, host="Chat.Example.com:443") is None
    assert code_of(listed, host="10.1.2.3:8000") is None  # the probes of Kubernetes
    assert code_of(listed, host="evil.example") == "host_not_allowed"
    assert code_of(guard(LOOPBACK, hosts=("*",)), host="evil.example") is None


@pytest.mark.parametrize("endpoint", [LOOPBACK, EVERYWHERE])
def test_an_origin_is_refused_unless_it_is_listed(endpoint: str) -> None:
    for origin in ("https://evil.example", "null", "http://localhost:8000", ""):
        assert code_of(guard(endpoint), host="localhost:8000", origin=origin) == "origin_not_allowed"
    listed = guard(endpoint, origins=("https://ui.example",))
    assert code_of(listed, host="localhost", origin="https://ui.example") is None
    assert code_of(listed, host="localhost", origin="https://ui.example.evil.org") == "origin_not_allowed"
    assert code_of(guard(endpoint, origins=("*",)), host="localhost", origin="https://a.example") is None


def test_allowed_pages_may_read_answers_and_others_may_not() -> None:
    rules = guard(origins=("https://ui.example",))
    allowed = rules.cors_headers({"Origin": "https://ui.example"})
    assert allowed["Access-Control-Allow-Origin"] == "https://ui.example"
    assert allowed["Vary"] == "Origin"
    assert rules.cors_headers({"Origin": "https://evil.example"}) == {"Vary": "Origin"}
    assert guard().cors_headers({"Origin": "https://ui.example"}) == {}


def test_a_preflight_request_lists_what_it_asked_for() -> None:
    rules = guard(origins=("https://ui.example",))
    asked = {"Origin": "https://ui.example", "Access-Control-Request-Method": "POST"}
    assert rules.is_preflight("OPTIONS", asked)
    assert not rules.is_preflight("POST", asked)
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    assert rules.preflight_headers(asked)["Access-Control-Allow-Headers"] == "authorization,content-type"
    asked["Access-Control-Request-Headers"] = "a;b"
    assert rules.preflight_headers(asked)["Access-Control-Allow-Headers"] == ""


def body_code(content_type: str | None, encoding: str | None = None) -> str | None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    headers |= {} if encoding is None else {"Content-Encoding": encoding}
    try:
        check_body(headers, content_type=(content_type or "application/octet-stream").partition(";")[0])
    except HttpRefusal as refusal:
        return f"{refusal.status} {refusal.code}"
    return None


def test_a_body_must_say_that_it_is_json() -> None:
    for good in ("application/json", "application/json; charset=utf-8"):
        assert body_code(good) is None
    for bad in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        assert body_code(bad) == "415 unsupported_content_type"


def test_an_unknown_encoding_of_a_body_is_refused() -> None:
    for good in ("gzip", "deflate", "identity", "GZip"):
        assert body_code("application/json", good) is None
    for bad in ("br", "foo", "gzip, gzip", ""):
        assert body_code("application/json", bad) == "415 unsupported_content_encoding"

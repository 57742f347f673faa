"""Authentication by API key, and the file that routers follow."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path

import pytest

from services.router.api.api_keys import ApiKeys, KeyIdentity, follow_keys
from services.router.metering.key_limits import check_limits
from slipstream.credentials.api_key_file import KeyRecord, KeyScope, add_key, key_hash, revoke_key
from slipstream.errors import Unauthenticated
from slipstream.metering.money import PICO
from slipstream.metering.rate_limits import RateLimits

RECORDS = (
    KeyRecord("laptop", "anna", KeyScope.TENANT, key_hash("one")),
    KeyRecord("root", "ops", KeyScope.OPERATOR, key_hash("two"), expires_s=1000.0),
)


class Clock:
    """A wall clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_revoked_key_keeps_its_name_for_requests_that_end_later() -> None:
    keys = ApiKeys(RECORDS)
    keys.replace(RECORDS[1:])
    assert not keys.counts(key_hash("one"))
    assert keys.key_name(key_hash("one")) == "laptop"


def test_a_key_has_a_name_a_tenant_and_a_scope() -> None:
    keys = ApiKeys(RECORDS, wall_clock_s=Clock())
    assert keys.identify({"authorization": "Bearer one"}) == KeyIdentity("laptop", "anna", KeyScope.TENANT)
    assert keys.identify({"authorization": "bearer two"}) == KeyIdentity("root", "ops", KeyScope.OPERATOR)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer one"},
        {"authorization": "BEARER  one "},
        {"x-api-key": "one"},
        {"api-key": "one"},
        {"authorization": "Bearer ", "api-key": "one"},
        {"authorization": "Basic abc", "x-api-key": "one"},
        {"x-api-key": "one", "api-key": "wrong"},
    ],
)
def test_three_headers_carry_a_key(headers: dict[str, str]) -> None:
    assert ApiKeys(RECORDS).tenant_of(headers) == "anna"


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer "}, {"authorization": "one"}, {"api-key": ""}]
)
def test_without_a_key_it_is_missing(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated, match="is missing"):
        ApiKeys(RECORDS).identify(headers)


def test_what_is_missing_names_what_the_client_sets() -> None:
    keys = ApiKeys(RECORDS)
    for headers, over_http, words in (
        ({}, True, "`Authorization: Bearer KEY`"),
        ({}, False, "--api-key or SLIPSTREAM_API_KEY"),
        ({"authorization": "Basic YTpi"}, True, "another scheme than Bearer"),
        ({"authorization": "Basic YTpi"}, False, "another scheme than Bearer"),
        ({"authorization": "Bearer"}, True, "send it as `Authorization"),
    ):
        with pytest.raises(Unauthenticated, match=words) as refused:
            keys.identify(headers, over_http=over_http)
        assert ("`slipstream` takes" in refused.value.message) == (words[0] == "-")
        assert "YTpi" not in refused.value.message


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer three"}, {"x-api-key": "\udcff"}, {"api-key": "laptop"}]
)
def test_a_key_that_was_given_is_wrong(headers: dict[str, str]) -> None:
    with pytest.raises(Unauthenticated, match="is wrong") as refused:
        ApiKeys(RECORDS).identify(headers)
    assert not set(headers.values()) & set(refused.value.message.split())


def test_a_key_ends_when_it_expires() -> None:
    clock = Clock()
    keys = ApiKeys(RECORDS, wall_clock_s=clock)
    clock.now_s = 999.0
    assert keys.tenant_of({"api-key": "two"}) == "ops"
    clock.now_s = 1000.0
    with pytest.raises(Unauthenticated, match="expired"):
        keys.tenant_of({"api-key": "two"})


def test_without_a_file_all_are_the_default_tenant_and_an_empty_file_refuses_all() -> None:
    assert ApiKeys().open
    assert ApiKeys().identify({}) == KeyIdentity("", "default", KeyScope.TENANT)
    assert not ApiKeys(()).open
    with pytest.raises(Unauthenticated):
        ApiKeys(()).identify({"api-key": "one"})


def test_an_empty_file_is_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, keys = tmp_path / "keys.toml", ApiKeys()
    path.touch()
    follow_keys(path, keys)
    assert not keys.open
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} has no API keys: every call that needs one is refused"
    ]


async def test_new_and_revoked_keys_count_after_a_poll(tmp_path: Path) -> None:
    path, keys = tmp_path / "keys.toml", ApiKeys()
    first = add_key(path, name="a", tenant="anna")
    following = follow_keys(path, keys)
    assert keys.tenant_of({"api-key": first}) == "anna"
    second = add_key(path, name="b", tenant="bert")
    await following.poll()
    assert keys.tenant_of({"api-key": second}) == "bert"
    revoke_key(path, "a")
    await following.poll()
    with pytest.raises(Unauthenticated, match="revoked"):
        keys.tenant_of({"api-key": first})
    assert keys.tenant_of({"api-key": second}) == "bert"


async def test_a_broken_file_keeps_the_keys_and_logs_one_line_without_the_key(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, keys = tmp_path / "keys.toml", ApiKeys()
    key = add_key(path, name="a", tenant="anna")
    following = follow_keys(path, keys)
    with caplog.at_level(logging.INFO):
        path.write_text(f"# new\n{key} bert\n")
        for _ in range(3):
            await following.poll()
        assert keys.tenant_of({"api-key": key}) == "anna"
        (record,) = caplog.records
        assert f"{path}:2:" in record.getMessage()
        assert key not in caplog.text and record.exc_info is None
        path.unlink()
        for _ in range(3):
            await following.poll()
        assert keys.tenant_of({"api-key": key}) == "anna"
        assert len(caplog.records) == 2
    later = add_key(path, name="b", tenant="bert")
    await following.poll()
    assert keys.tenant_of({"api-key": later}) == "bert"


async def test_a_file_that_is_being_rewritten_in_place_drops_no_key(tmp_path: Path) -> None:
    path, keys = tmp_path / "keys.toml", ApiKeys()
    first, second = add_key(path, name="a", tenant="anna"), add_key(path, name="b", tenant="bert")
    whole = path.read_text()
    following = follow_keys(path, keys)
    for cut in ("", whole[: whole.rindex("[[key]]")], whole):
        path.write_text(cut)
        await following.poll()
        assert (keys.tenant_of({"api-key": first}), keys.tenant_of({"api-key": second})) == ("anna", "bert")
    path.write_text("")
    for _ in range(3):
        await following.poll()
    assert keys.tenant_of({"api-key": second}) == "bert"
    path.write_text(whole[: whole.rindex("[[key]]")])
    for _ in range(2):
        await following.poll()
    with pytest.raises(Unauthenticated):
        keys.tenant_of({"api-key": second})


async def test_the_file_is_polled_every_second(tmp_path: Path) -> None:
    path, keys = tmp_path / "keys.toml", ApiKeys()
    add_key(path, name="a", tenant="anna")
    following = follow_keys(path, keys)
    waits: list[float] = []
    second = ""

    async def sleep(seconds: float) -> None:
        nonlocal second
        waits.append(seconds)
        if len(waits) == 2:
            second = add_key(path, name="b", tenant="bert")
        if len(waits) == 3:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await following.run(sleep=sleep)
    assert keys.tenant_of({"api-key": second}) == "bert"
    assert sum(waits[1:]) <= 2


def test_a_broken_file_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("secret anna\n")
    with pytest.raises(ValueError, match=r"keys\.toml:1") as refused:
        follow_keys(path, ApiKeys())
    assert "secret" not in str(refused.value).removeprefix(str(path))


async def test_a_file_that_the_router_cannot_hold_to_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path, keys = tmp_path / "keys.toml", ApiKeys()
    spend = RateLimits(spend_per_day=PICO)
    add_key(path, name="a", tenant="anna", limits=spend)
    check = partial(check_limits, has_prices=True, has_database=False)
    with pytest.raises(ValueError, match=r"keys\.toml: limits of spend need a router's --prices"):
        follow_keys(path, keys, check=check)
    revoke_key(path, "a")
    first = add_key(path, name="b", tenant="bert", limits=RateLimits(requests_per_minute=1))
    following = follow_keys(path, keys, check=check)
    add_key(path, name="c", tenant="bert", limits=spend)
    await following.poll()
    assert keys.limits_of("bert", key_hash(first)) == [("key:b", RateLimits(requests_per_minute=1))]
    assert keys.key_name(key_hash(first)) == "b"
    revoke_key(path, "c")
    with path.open("a") as file:
        file.write('\n[[tenant]]\nname = "bert"\nconcurrent_requests = 2\n')
    for _ in range(2):
        await following.poll()
    assert keys.limits_of("bert", key_hash(first))[1] == ("tenant:bert", RateLimits(concurrent_requests=2))
    assert keys.limits_of("anna", b"") == []

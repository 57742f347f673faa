"""Limits at one router and at several that share a database, with a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from libs.common.service_bounds import LIMIT_LEASE_S
from libs.common.telemetry.counters import Counters
from libs.database.database import Database
from libs.database.errors import DatabaseUnavailable
from services.router.metering.lease import overdraft
from services.router.metering.lease_renewal import LeaseRenewal
from services.router.metering.lease_store import LeaseRequest, LeaseStore
from services.router.metering.limit_headers import openai_headers
from services.router.metering.limit_window import LimitKind, LimitWindow, duration_text, window_of
from services.router.metering.limiter import LimitedUse, Limiter, Reservation
from slipstream.errors import Overloaded, QuotaExceeded, RateLimited
from slipstream.metering.money import PICO
from slipstream.metering.rate_limits import RateLimits

MINUTE = 1_800_000_000  # a full minute, day 2027-01-15


class Clock:
    """A wall clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = float(MINUTE)

    def __call__(self) -> float:
        return self.now_s


class Source:
    """One key and one tenant."""

    def __init__(self, key: RateLimits | None, tenant: RateLimits | None = None) -> None:
        self.limits = [("key:laptop", key), ("tenant:anna", tenant)]

    def key_name(self, sha256: bytes) -> str:
        return "laptop"

    def limits_of(self, tenant: str, sha256: bytes) -> Sequence[tuple[str, RateLimits]]:
        return [(subject, limits) for subject, limits in self.limits if limits is not None]


class Router:
    """A limiter, and its renewal where it has a database."""

    def __init__(
        self,
        source: Source,
        clock: Clock,
        *,
        database: Database | None = None,
        n_routers: int = 1,
        name: str = "router-0",
    ) -> None:
        self.counters = Counters()
        self.limiter = Limiter(
            source,
            wall_clock_s=clock,
            n_routers=lambda: n_routers,
            is_shared=database is not None,
            counters=self.counters,
        )
        self.renewal = None
        if database is not None:
            self.renewal = LeaseRenewal(self.limiter, LeaseStore(database, name), self.counters)

    def admit(self, *, prompt: int = 10, output: int = 10, spend: int = 0, requests: int = 1) -> Reservation:
        found = self.limiter.admit("anna", b"", LimitedUse(requests, prompt, output, spend))
        assert found is not None
        return found

    def passes(self, **use: int) -> bool:
        try:
            self.admit(**use)
        except Overloaded:
            return False
        return True

    async def renew(self) -> None:
        assert self.renewal is not None
        await self.renewal.renew()


def test_a_minute_has_so_many_requests_and_the_next_one_as_many_again() -> None:
    clock = Clock()
    router = Router(Source(RateLimits(requests_per_minute=3)), clock)
    assert [router.passes() for _ in range(4)] == [True, True, True, False]
    clock.now_s += 45
    with pytest.raises(RateLimited, match="the limit of 3 requests a minute for key laptop is reached") as no:
        router.admit()
    assert no.value.retry_after_ms == 15_000
    clock.now_s += 15
    assert [router.passes() for _ in range(4)] == [True, True, True, False]


def test_the_tighter_of_key_and_tenant_counts_and_stands_in_the_headers() -> None:
    source = Source(RateLimits(requests_per_minute=9), RateLimits(requests_per_minute=2))
    router = Router(source, Clock())
    assert [router.passes() for _ in range(3)] == [True, True, False]
    states = router.limiter.states("anna", b"")
    assert openai_headers(states, router.limiter.wall_clock_s()) == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    # What the tenant's limit refuses is not taken from the key's.
    assert router.limiter.leases["key:laptop", LimitKind.REQUESTS].lease.used == 2


@pytest.mark.parametrize("is_shared", [False, True])
def test_the_end_of_a_request_leaves_a_limit_that_was_lowered_meanwhile(is_shared: bool) -> None:
    source = Source(RateLimits(tokens_per_minute=100))
    router = Router(source, Clock())
    router.limiter._is_shared = is_shared
    before = router.admit(prompt=40, output=50)
    source.limits = [("key:laptop", RateLimits(tokens_per_minute=30))]
    assert not router.passes()
    before.end(n_requests=1, tokens=20, spend_pico=0)
    lease = router.limiter.leases["key:laptop", LimitKind.TOKENS].lease
    assert (lease.limit, lease.used) == (30, 20)


def test_estimates_of_tokens_are_replaced_when_the_request_ends() -> None:
    clock = Clock()
    router = Router(Source(RateLimits(tokens_per_minute=100)), clock)
    first = router.admit(prompt=40, output=50)
    first.end(n_requests=1, tokens=30, spend_pico=0)
    assert [each.remaining for each in router.limiter.states("anna", b"")] == [70]
    second = router.admit(prompt=40, output=50)
    clock.now_s += 60
    second.end(n_requests=1, tokens=120, spend_pico=0)  # 30 more than estimated count in this minute
    second.end(n_requests=1, tokens=120, spend_pico=0)
    assert [each.remaining for each in router.limiter.states("anna", b"")] == [70]
    with pytest.raises(RateLimited, match="about 101 tokens, more than the limit of 100") as refused:
        router.admit(prompt=101)
    assert not refused.value.retry_after_ms


def test_a_request_that_was_refused_for_capacity_gives_back_what_it_took() -> None:
    router = Router(Source(RateLimits(requests_per_minute=1, concurrent_requests=1)), Clock())
    router.admit().end(n_requests=0, tokens=0, spend_pico=0)
    router.admit().end(n_requests=1, tokens=0, spend_pico=0)
    assert not router.passes()
    limited = list(router.counters.values())
    assert limited == [("slipstream_limited_total", ("requests_per_minute",), 1)]


def test_concurrent_requests_end_in_any_minute() -> None:
    clock = Clock()
    router = Router(Source(RateLimits(concurrent_requests=2)), clock)
    first, _ = router.admit(), router.admit()
    with pytest.raises(RateLimited, match="2 requests at a time"):
        router.admit()
    clock.now_s += 3600
    assert not router.passes()
    first.end(n_requests=1, tokens=5, spend_pico=0)
    assert [router.passes(), router.passes()] == [True, False]


def test_spend_is_a_quota_of_the_calendar_month() -> None:
    clock = Clock()
    router = Router(Source(None, RateLimits(spend_per_month=PICO // 2)), clock)
    router.admit(spend=1).end(n_requests=1, tokens=9, spend_pico=PICO)
    with pytest.raises(QuotaExceeded, match=r"the limit of 0\.5 a month for tenant anna") as refused:
        router.admit()
    assert refused.value.retry_after_ms / 1e3 == 17 * 86_400 - MINUTE % 86_400  # until 1 February
    clock.now_s += 17 * 86_400
    assert router.passes()


def test_further_choices_of_a_request_are_never_refused() -> None:
    router = Router(Source(RateLimits(requests_per_minute=1, tokens_per_minute=20)), Clock())
    router.admit()
    assert not router.passes()
    router.admit(requests=0, prompt=0)


def test_without_a_database_each_router_has_an_equal_part() -> None:
    router = Router(Source(RateLimits(requests_per_minute=9)), Clock(), n_routers=4)
    assert sum(router.passes() for _ in range(9)) == 2


async def test_routers_share_a_limit_in_any_split_of_requests(database: Database) -> None:
    clock = Clock()
    source = Source(RateLimits(requests_per_minute=100))
    routers = [
        Router(source, clock, database=database, n_routers=3, name=f"router-{index}") for index in range(3)
    ]
    passed = 0
    for index in range(600):  # nearly all at the first router
        router = routers[0 if index % 10 else index // 10 % 3]
        passed += router.passes()
        if index % 5 == 0:
            await router.renew()
    assert 100 <= passed <= 100 + 3 * overdraft(100, 3)
    for router in routers:
        await router.renew()
        assert not router.passes()
    seen = openai_headers(routers[1].limiter.states("anna", b""), 0.0)
    assert seen["x-ratelimit-remaining-requests"] == "0"


async def test_an_estimate_beyond_the_limit_that_is_given_back_leaves_only_the_limit(
    database: Database,
) -> None:
    router = Router(Source(RateLimits(spend_per_day=10)), Clock(), database=database)
    first = router.admit(spend=1000)
    await router.renew()
    first.end(n_requests=1, tokens=1, spend_pico=20)
    assert not router.passes()
    await router.renew()
    assert not router.passes()


async def test_a_router_that_was_killed_frees_what_it_held_and_not_what_it_used(database: Database) -> None:
    clock = Clock()
    source = Source(RateLimits(spend_per_day=1000))
    killed = Router(source, clock, database=database, n_routers=2, name="killed")
    for _ in range(4):
        killed.admit(spend=100).end(n_requests=1, tokens=0, spend_pico=100)
        await killed.renew()
    held = killed.limiter.leases["key:laptop", LimitKind.SPEND_DAY].lease
    assert held.granted > held.used == 400
    clock.now_s += LIMIT_LEASE_S + 1
    fresh = Router(source, clock, database=database, n_routers=1, name="fresh")
    fresh.admit(spend=0)
    await fresh.renew()
    lease = fresh.limiter.leases["key:laptop", LimitKind.SPEND_DAY].lease
    assert lease.room == 600


async def test_concurrent_places_of_a_killed_router_are_free_after_its_lease(database: Database) -> None:
    clock = Clock()
    source = Source(RateLimits(concurrent_requests=8))
    killed = Router(source, clock, database=database, n_routers=1, name="killed")
    for _ in range(8):
        killed.admit()
    await killed.renew()
    fresh = Router(source, clock, database=database, n_routers=1, name="fresh")
    reservation = fresh.admit()
    await fresh.renew()
    assert not fresh.passes()
    reservation.end(n_requests=1, tokens=0, spend_pico=0)
    clock.now_s += LIMIT_LEASE_S + 1
    await fresh.renew()
    assert fresh.passes()


async def test_while_the_database_is_unavailable_a_router_has_its_overdraft_alone(database: Database) -> None:
    clock = Clock()
    source = Source(RateLimits(requests_per_minute=80, concurrent_requests=80))
    router = Router(source, clock, database=database, n_routers=2)

    async def fail(*_: Any, **__: Any) -> None:
        raise DatabaseUnavailable("gone")

    assert router.renewal is not None
    router.renewal._store.renew = fail  # type: ignore[assignment]
    for _ in range(5):
        while router.passes():
            pass
        await router.renew()
    assert router.limiter.leases["key:laptop", LimitKind.REQUESTS].lease.used == overdraft(80, 2) == 10
    clock.now_s += 60
    assert router.passes() is False  # ten still run


async def test_leases_that_are_not_needed_leave_the_database_and_memory(database: Database) -> None:
    clock = Clock()
    source = Source(RateLimits(requests_per_minute=5, concurrent_requests=5))
    router = Router(source, clock, database=database, n_routers=2)
    reservation = router.admit()
    await router.renew()
    reservation.end(n_requests=1, tokens=1, spend_pico=0)
    for _ in range(3):
        await router.renew()
    assert set(router.limiter.leases) == {("key:laptop", LimitKind.REQUESTS)}
    clock.now_s += 300
    await router.renew()
    assert not router.limiter.leases
    router.admit()
    await router.renew()
    rows = await database.read(lambda tx: tx.execute("SELECT kind, used FROM limit_leases ORDER BY kind"))
    assert rows == [("concurrent_requests", 1), ("requests_per_minute", 1)]


@pytest.mark.parametrize(
    ("kind", "start", "end"),
    [
        (LimitKind.REQUESTS, MINUTE, MINUTE + 60),
        (LimitKind.SPEND_DAY, MINUTE - MINUTE % 86_400, MINUTE - MINUTE % 86_400 + 86_400),
        (LimitKind.SPEND_MONTH, 1_798_761_600, 1_801_440_000),  # January 2027
        (LimitKind.CONCURRENT, 0, None),
    ],
)
def test_windows_are_those_of_the_calendar(kind: LimitKind, start: int, end: int | None) -> None:
    assert window_of(kind, MINUTE + 59.5) == LimitWindow(start, end)
    if end is not None:
        assert window_of(kind, end).start_unix_s == end


@pytest.mark.parametrize(
    ("left_s", "text"), [(0.12, "120ms"), (6, "6s"), (90, "1m30s"), (10_800, "3h0m0s"), (-1, "0ms")]
)
def test_durations_read_as_those_of_openai(left_s: float, text: str) -> None:
    assert duration_text(left_s) == text


async def test_renewals_at_the_same_time_grant_no_more_than_the_limit(database: Database) -> None:
    stores = [LeaseStore(database, f"router-{index}") for index in range(12)]
    ask = LeaseRequest("key:laptop", "requests_per_minute", MINUTE, 100, 0, 40, MINUTE + 60.0)
    for _ in range(3):
        grants = await asyncio.gather(*[store.renew([ask], now_unix_s=MINUTE) for store in stores])
        assert sum(grant.granted for (grant,) in grants) == 100


def test_the_share_of_spend_is_that_of_the_fullest_limit_and_ends_with_its_window() -> None:
    clock = Clock()
    router = Router(Source(RateLimits(spend_per_day=1000, spend_per_month=8000)), clock)
    day, month = LimitKind.SPEND_DAY, LimitKind.SPEND_MONTH
    assert router.limiter.spend_shares() == {day: 0.0, month: 0.0}
    router.admit(spend=800)
    assert router.limiter.spend_shares() == {day: 0.8, month: 0.1}
    clock.now_s += 86_400
    assert router.limiter.spend_shares()[day] == 0.0

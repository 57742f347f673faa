"""Counters in the database: sums are exact, and each batch counts once whatever breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.telemetry.counters import Counters
from libs.database.database import Database
from libs.database.errors import DatabaseUnavailable
from services.router.metering import usage_store
from services.router.metering.usage_ledger import UsageLedger
from services.router.metering.usage_query import UsageColumn, UsageQuery, parse_usage_query
from services.router.metering.usage_store import UsageCounts, UsageKey, UsageStore
from slipstream.errors import InvalidArgument, PermissionDenied
from slipstream.metering.money import PICO

DAY = date(2027, 1, 15)
KEY = UsageKey("anna", "laptop", "tiny", "/v1/chat/completions", DAY.isoformat(), "USD")
ALL = UsageQuery(DAY, DAY, (), None)


class BreakingStore(UsageStore):
    """Fails before or after the commit, as the test says."""

    def __init__(self, database: Database, writer: str, faults: list[str]) -> None:
        super().__init__(database, writer)
        self.faults = faults

    async def add(self, number: int, batch: Mapping[UsageKey, UsageCounts], *, now_unix_s: float) -> None:
        fault = self.faults.pop(0) if self.faults else ""
        if fault != "before":
            await super().add(number, batch, now_unix_s=now_unix_s)
        if fault:
            raise DatabaseUnavailable("broken", may_have_committed=True)


def ledger_of(store: UsageStore) -> UsageLedger:
    return UsageLedger(store, wall_clock_s=lambda: 1.8e9, counters=Counters())


async def test_sums_are_exact_beyond_64_bits_of_picos(database: Database) -> None:
    store = UsageStore(database, "a")
    huge = 9_000_000 * PICO + 1
    for number in range(1, 4):
        await store.add(number, {KEY: UsageCounts(1, 10, 4, 2, huge)}, now_unix_s=0)
    (row,) = await store.read(ALL)
    assert row.counts == UsageCounts(3, 30, 12, 6, 3 * huge)
    assert row.currency == "USD"


async def test_a_batch_counts_once_whether_the_commit_was_lost_before_or_after(database: Database) -> None:
    ledger = ledger_of(BreakingStore(database, "a", ["after", "before", "after", "after"]))
    other = ledger_of(UsageStore(database, "b"))
    for _ in range(6):
        ledger.add(KEY, UsageCounts(1, 10, 0, 1, 7))
        other.add(KEY, UsageCounts(1, 10, 0, 1, 7))
        await asyncio.gather(ledger.write(), other.write())
    assert await ledger.write()
    assert ledger.unwritten_requests == 0
    (row,) = await ledger.read(ALL)
    assert row.counts == UsageCounts(12, 120, 0, 12, 84)


async def test_what_is_counted_during_a_write_goes_into_the_next_batch(database: Database) -> None:
    ledger = ledger_of(UsageStore(database, "a"))
    ledger.add(KEY, UsageCounts(1))
    writing = asyncio.create_task(ledger.write())
    await asyncio.sleep(0)
    ledger.add(KEY, UsageCounts(1))
    await writing
    (row,) = await ledger.read(ALL)
    assert row.counts.requests == 2


async def test_rows_are_grouped_filtered_and_bounded(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = UsageStore(database, "a")
    batch = {
        KEY._replace(tenant=tenant, day=f"2027-01-{day:02}", currency=currency): UsageCounts(requests=1)
        for tenant in ("anna", "bert")
        for day in (14, 15)
        for currency in ("USD", "EUR")
    }
    await store.add(1, batch, now_unix_s=0)
    query = UsageQuery(DAY, DAY, (UsageColumn.TENANT, UsageColumn.KEY), None)
    rows = await store.read(query)
    assert [(row.group, row.currency, row.counts.requests) for row in rows] == [
        ({"tenant": tenant, "key": "laptop"}, currency, 1)
        for tenant in ("anna", "bert")
        for currency in ("EUR", "USD")
    ]
    (eur, _) = await store.read(UsageQuery(date(2027, 1, 1), DAY, (), "bert"))
    assert (eur.currency, eur.counts.requests) == ("EUR", 2)
    monkeypatch.setattr(usage_store, "MAX_USAGE_ROWS", 3)
    with pytest.raises(InvalidArgument, match="group_by"):
        await store.read(query)


@given(st.lists(st.integers(0, 10**30), max_size=20))
def test_the_two_columns_of_a_cost_give_its_sum(costs: list[int]) -> None:
    stored = [usage_store._stored(UsageCounts(cost_pico=cost))[-2:] for cost in costs]
    micros, rests = sum(micro for micro, _ in stored), sum(rest for _, rest in stored)
    assert micros * usage_store._PICO_IN_MICRO + rests == sum(costs)
    assert all(0 <= rest < usage_store._PICO_IN_MICRO for _, rest in stored)


ASKED: dict[str, Any] = {
    "from_day": "",
    "to_day": "",
    "group_by": [],
    "tenant": "",
    "own_tenant": "anna",
    "is_operator": False,
    "today": DAY,
}


def test_a_question_without_fields_is_of_thirty_days_of_the_own_tenant() -> None:
    assert parse_usage_query(**ASKED) == UsageQuery(date(2026, 12, 17), DAY, (), "anna")
    assert parse_usage_query(**ASKED | {"is_operator": True}).tenant is None
    assert parse_usage_query(**ASKED | {"is_operator": True, "tenant": "bert"}).tenant == "bert"
    assert parse_usage_query(**ASKED | {"tenant": "anna"}).tenant == "anna"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"from_day": "yesterday"}, "from"),
        ({"to_day": "20270115"}, "to"),
        ({"from_day": "2027-01-16"}, "from"),
        ({"group_by": ["day", "hour"]}, "group_by"),
        ({"group_by": ["day", "day"]}, "group_by"),
    ],
)
def test_a_wrong_question_names_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_usage_query(**ASKED | fields)
    assert refused.value.field == field


def test_other_tenants_are_for_operators() -> None:
    with pytest.raises(PermissionDenied, match="operator"):
        parse_usage_query(**ASKED | {"tenant": "bert"})

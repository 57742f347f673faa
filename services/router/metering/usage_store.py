"""Counters of usage in the database: one row a tenant, key, model, endpoint, day and currency.

Several routers add to the same rows. A batch of additions counts once. Its number is written in the same
transaction, so a batch whose commit may have happened is sent again without harm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from libs.common.service_bounds import MAX_USAGE_ROWS
from libs.database.database import Database
from libs.database.schema import Schema
from libs.database.transaction import SqlTransaction, SqlValue
from services.router.metering.usage_query import UsageQuery
from slipstream.errors import InvalidArgument

SCHEMA = Schema(
    "usage",
    steps=(
        (
            "CREATE TABLE IF NOT EXISTS usage_counters (tenant TEXT, key_name TEXT, model TEXT, "
            "endpoint TEXT, day TEXT, currency TEXT, requests BIGINT NOT NULL, "
            "prompt_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL, "
            "completion_tokens BIGINT NOT NULL, cost_micro BIGINT NOT NULL, cost_pico_rest BIGINT NOT NULL, "
            "PRIMARY KEY (tenant, day, key_name, model, endpoint, currency))",
            "CREATE INDEX IF NOT EXISTS usage_counters_by_day ON usage_counters (day)",
            "CREATE TABLE IF NOT EXISTS usage_batches (writer TEXT PRIMARY KEY, "
            "last_batch BIGINT NOT NULL, written_unix_s DOUBLE PRECISION NOT NULL)",
        ),
    ),
)
_PICO_IN_MICRO = 10**6
_KEPT_S = 30 * 86_400.0  # the number of a writer's last batch
_CLAIM = (
    "INSERT INTO usage_batches (writer, last_batch, written_unix_s) VALUES (?, ?, ?) "
    "ON CONFLICT (writer) DO UPDATE SET last_batch = excluded.last_batch, "
    "written_unix_s = excluded.written_unix_s WHERE usage_batches.last_batch < excluded.last_batch "
    "RETURNING last_batch"
)
_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_micro", "cost_pico_rest")
_ADD = (
    "INSERT INTO usage_counters (tenant, key_name, model, endpoint, day, currency, "
    f"{', '.join(_COUNTS)}) VALUES ({', '.join('?' * 12)}) "
    "ON CONFLICT (tenant, day, key_name, model, endpoint, currency) DO UPDATE SET "
    + ", ".join(f"{name} = usage_counters.{name} + excluded.{name}" for name in _COUNTS)
)
_SUMS = ", ".join(f"SUM({name})" for name in _COUNTS)


class UsageKey(NamedTuple):
    """The key of a counter. `day` is of UTC, as 2027-01-31; `currency` empty: without a price."""

    tenant: str
    key_name: str
    model: str
    endpoint: str
    day: str
    currency: str


@dataclass(slots=True)
class UsageCounts:
    """Totals. `prompt_tokens` include the cached ones; the cost is in 10^-12 of the currency."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_pico: int = 0

    def add(self, other: UsageCounts) -> None:
        """Add another count to this one."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.cost_pico += other.cost_pico


@dataclass(frozen=True, slots=True)
class UsageSum:
    """A row of an answer: `group` has the values by which rows are grouped, by name."""

    group: Mapping[str, str]
    currency: str
    counts: UsageCounts


class UsageStore:
    """The counters. `writer` names this router process; no other process ever has its name."""

    def __init__(self, database: Database, writer: str) -> None:
        self._database = database
        self._writer = writer
        database.declare(SCHEMA)

    async def add(self, number: int, batch: Mapping[UsageKey, UsageCounts], *, now_unix_s: float) -> None:
        """Add a batch; a number that was added before adds nothing. Raises what the database raises."""
        rows: list[tuple[SqlValue, ...]] = [(*key, *_stored(counts)) for key, counts in batch.items()]
        work = partial(_add, self._writer, number, now_unix_s, rows)
        await self._database.run(work, is_idempotent=True)

    async def read(self, query: UsageQuery) -> list[UsageSum]:
        """The sums of a query. Raises InvalidArgument for too many rows."""
        return await self._database.read(partial(_read, query), tenant=query.tenant or "")


def _stored(counts: UsageCounts) -> tuple[int, ...]:
    """The cost as two numbers: in one, a large sum would exceed 64 bits."""
    micro, rest = divmod(counts.cost_pico, _PICO_IN_MICRO)
    tokens = (counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens)
    return counts.requests, *tokens, micro, rest


def _add(
    writer: str, number: int, now_unix_s: float, rows: Sequence[tuple[SqlValue, ...]], tx: SqlTransaction
) -> None:
    if not tx.execute(_CLAIM, (writer, number, now_unix_s)):
        return  # added by an earlier attempt
    if number == 1:
        tx.execute("DELETE FROM usage_batches WHERE written_unix_s < ?", (now_unix_s - _KEPT_S,))
    tx.execute_many(_ADD, rows)


def _read(query: UsageQuery, tx: SqlTransaction) -> list[UsageSum]:
    names = [*(name.column for name in query.group_by), "currency"]
    columns = ", ".join(names)
    where, values = "day >= ? AND day <= ?", [query.from_day.isoformat(), query.to_day.isoformat()]
    if query.tenant is not None:
        where += " AND tenant = ?"
        values.append(query.tenant)
    found = tx.execute(
        f"SELECT {columns}, {_SUMS} FROM usage_counters WHERE {where} "
        f"GROUP BY {columns} ORDER BY {columns} LIMIT {MAX_USAGE_ROWS + 1}",
        values,
    )
    if len(found) > MAX_USAGE_ROWS:
        raise InvalidArgument("group_by", f"makes more than {MAX_USAGE_ROWS} rows; ask for fewer days")
    return [_row(query, names, row) for row in found]


def _row(query: UsageQuery, names: Sequence[str], row: tuple[SqlValue, ...]) -> UsageSum:
    values = [str(value) for value in row[: len(names)]]
    # PostgreSQL answers sums as decimals.
    requests, prompt, cached, completion, micro, rest = (int(value or 0) for value in row[len(names) :])
    return UsageSum(
        {name.value: value for name, value in zip(query.group_by, values, strict=False)},
        values[-1],
        UsageCounts(requests, prompt, cached, completion, micro * _PICO_IN_MICRO + rest),
    )

"""The leases of all routers in the database: who holds how much of each limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from libs.common.service_bounds import LIMIT_LEASE_S
from libs.database.database import Database
from libs.database.schema import Schema
from libs.database.transaction import SqlTransaction
from services.router.metering.lease import granted_of

SCHEMA = Schema(
    "limits",
    steps=(
        (
            "CREATE TABLE IF NOT EXISTS limit_leases (subject TEXT, kind TEXT, window_unix_s BIGINT, "
            "holder TEXT, granted BIGINT NOT NULL, used BIGINT NOT NULL, "
            "renewed_unix_s DOUBLE PRECISION NOT NULL, expires_unix_s DOUBLE PRECISION NOT NULL, "
            "PRIMARY KEY (subject, kind, window_unix_s, holder))",
            "CREATE INDEX IF NOT EXISTS limit_leases_by_end ON limit_leases (expires_unix_s)",
            "CREATE TABLE IF NOT EXISTS limit_lock (id BIGINT PRIMARY KEY, version BIGINT NOT NULL)",
        ),
    ),
)
_LOCK = (
    "INSERT INTO limit_lock (id, version) VALUES (1, 1) "
    "ON CONFLICT (id) DO UPDATE SET version = limit_lock.version + 1"
)
_READ = (
    "SELECT holder, granted, used, renewed_unix_s FROM limit_leases "
    "WHERE subject = ? AND kind = ? AND window_unix_s = ?"
)
_WRITE = (
    "INSERT INTO limit_leases (subject, kind, window_unix_s, holder, granted, used, "
    "renewed_unix_s, expires_unix_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (subject, kind, window_unix_s, holder) DO UPDATE SET granted = excluded.granted, "
    "used = excluded.used, renewed_unix_s = excluded.renewed_unix_s, expires_unix_s = excluded.expires_unix_s"
)


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """A router's request for a part of one limit in one window. `asked` 0 gives the lease back."""

    subject: str
    kind: str
    window_unix_s: int
    limit: int
    used: int
    asked: int
    expires_unix_s: float


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """The part that it got, and what the other routers hold and have used."""

    granted: int
    others_granted: int
    others_used: int


class LeaseStore:
    """Renews the leases of one router. `holder`: its name, which no other process ever has."""

    def __init__(self, database: Database, holder: str) -> None:
        self._database = database
        self._holder = holder
        database.declare(SCHEMA)

    async def renew(self, asks: Sequence[LeaseRequest], *, now_unix_s: float) -> list[LeaseGrant]:
        """The grants in the order of the requests. Raises what the database raises."""
        work = partial(_renew, asks, self._holder, now_unix_s)
        return await self._database.run(work, is_idempotent=True)

    async def close(self, *, now_unix_s: float) -> None:
        """Give back what this router holds and has not used."""
        await self._database.run(partial(_release_leases, self._holder, now_unix_s), is_idempotent=True)


def _renew(
    asks: Sequence[LeaseRequest], holder: str, now_unix_s: float, tx: SqlTransaction
) -> list[LeaseGrant]:
    tx.execute(_LOCK)  # one router at a time, on PostgreSQL too
    tx.execute("DELETE FROM limit_leases WHERE expires_unix_s <= ?", (now_unix_s,))
    grants, rows = [], []
    for ask in asks:
        place = (ask.subject, ask.kind, ask.window_unix_s)
        found = tx.execute(_READ, place)
        held = sum(granted for name, granted, _, _ in found if name == holder)
        others = [row for row in found if row[0] != holder]
        others_used = sum(used for _, _, used, _ in others)
        # What a router holds in advance is free again once the router has not renewed it in time.
        others_granted = sum(
            granted if renewed > now_unix_s - LIMIT_LEASE_S else used for _, granted, used, renewed in others
        )
        granted = granted_of(ask.limit, used=ask.used, asked=ask.asked, held=held, others=others_granted)
        grants.append(LeaseGrant(granted, others_granted, others_used))
        rows.append((*place, holder, granted, ask.used, now_unix_s, ask.expires_unix_s))
    tx.execute_many(_WRITE, rows)
    return grants


def _release_leases(holder: str, now_unix_s: float, tx: SqlTransaction) -> None:
    tx.execute(_LOCK)
    tx.execute("DELETE FROM limit_leases WHERE holder = ? AND kind = ?", (holder, "concurrent_requests"))
    tx.execute(
        "UPDATE limit_leases SET granted = used WHERE holder = ? AND granted > used AND expires_unix_s > ?",
        (holder, now_unix_s),
    )

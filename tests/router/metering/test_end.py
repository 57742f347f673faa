"""The end of a router while its database is away: bounded, and said once."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from pathlib import Path

import pytest

from libs.common.telemetry.counters import Counters
from libs.database.database import open_database
from services.router.metering import assembly
from services.router.metering.assembly import MeteringTasks
from services.router.metering.lease_renewal import LeaseRenewal
from services.router.metering.lease_store import LeaseStore
from services.router.metering.limiter import LimitedUse, Limiter
from services.router.metering.usage_ledger import UsageLedger
from services.router.metering.usage_store import UsageCounts, UsageKey, UsageStore
from slipstream.metering.rate_limits import RateLimits
from tests.router.metering.test_limiter import MINUTE, Source

KEY = UsageKey("anna", "laptop", "tiny", "/v1/completions", "2027-01-15", "USD")


@pytest.mark.parametrize("has_limits", [False, True])
@pytest.mark.parametrize("is_away", [False, True])
async def test_an_end_names_once_what_the_database_does_not_take(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    is_away: bool,
    has_limits: bool,
) -> None:
    monkeypatch.setattr(assembly, "DATABASE_END_S", 0.1 if is_away else 100.0)
    database = open_database(f"sqlite:{tmp_path}/test.db")
    limits = RateLimits(requests_per_minute=9) if has_limits else None
    counters = Counters()
    limiter = Limiter(
        Source(limits),
        wall_clock_s=lambda: float(MINUTE),
        n_routers=lambda: 2,
        is_shared=True,
        counters=counters,
    )
    renewal = LeaseRenewal(limiter, LeaseStore(database, "a"), counters)
    ledger = UsageLedger(UsageStore(database, "a"), wall_clock_s=lambda: float(MINUTE), counters=counters)
    limiter.admit("anna", b"", LimitedUse(1, 1, 1, 0))
    await renewal.renew()
    ledger.add(KEY, UsageCounts(requests=3))
    await ledger.write()
    ledger.add(KEY, UsageCounts(requests=2))
    other = sqlite3.connect(tmp_path / "test.db", isolation_level=None)
    if is_away:
        other.execute("BEGIN IMMEDIATE")
    caplog.clear()
    tasks = MeteringTasks(renewal, ledger)
    tasks.start(asyncio.Event().wait(), "one that waits")  # type: ignore[arg-type]
    await tasks.close()
    said = [(record.levelno, record.getMessage()) for record in caplog.records]
    not_given_back = "the router's part of limits is not given back, and is free after 10 s: "
    expected = [(logging.WARNING, f"{not_given_back}the database does not answer")] * has_limits
    assert said == [*expected, (logging.ERROR, "the usage of 2 requests is lost")] * is_away
    other.close()
    await database.close()

"""Builds the meter of a router, and runs its background tasks."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from libs.common.cluster.discovery import Fleet
from libs.common.cluster.worker_record import Role
from libs.common.runtime.followed_file import FollowedFile
from libs.common.service_bounds import DATABASE_END_S, LIMIT_LEASE_S
from libs.common.telemetry.counters import Counters
from libs.database.database import Database
from services.router.metering.lease_renewal import LeaseRenewal
from services.router.metering.lease_store import LeaseStore
from services.router.metering.limiter import Limiter, LimitSource
from services.router.metering.metering import Metering
from services.router.metering.price_list import read_prices
from services.router.metering.usage_ledger import UsageLedger
from services.router.metering.usage_store import UsageStore
from slipstream.errors import SlipstreamError

log = logging.getLogger(__name__)


class MeteringTasks:
    """The background tasks. `close` ends them, and writes what there is."""

    def __init__(self, renewal: LeaseRenewal | None, ledger: UsageLedger | None) -> None:
        self._renewal = renewal
        self._ledger = ledger
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run this until `close`."""
        self._tasks.append(asyncio.create_task(work, name=name))

    async def close(self) -> None:
        """End the tasks; then write the usage and give leases back, if the database is there."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        reason = ""
        try:
            async with asyncio.timeout(DATABASE_END_S):
                await self._write()
        except (SlipstreamError, TimeoutError) as error:
            reason = str(error) or "the database does not answer"
        if self._renewal is not None and self._renewal.has_leases:
            log.warning(
                "the router's part of limits is not given back, and is free after %g s: %s",
                LIMIT_LEASE_S,
                reason,
            )
        if self._ledger is not None and self._ledger.unwritten_requests:
            log.error("the usage of %d requests is lost", self._ledger.unwritten_requests)

    async def _write(self) -> None:
        """Raises what the database raises."""
        if self._ledger is not None:
            await self._ledger.write()
        if self._renewal is not None:
            await self._renewal.close()


def make_metering(
    keys: LimitSource,
    names: Sequence[str],
    counters: Counters,
    members: Fleet,
    *,
    instance: str,
    prices: Path | None,
    database: Database | None,
    wall_clock_s: Callable[[], float] = time.time,
) -> Metering:
    """The meter of the router `instance`, whose model has these names. `members`: where routers are found.

    `database` keeps usage, and shares limits; without it each router has a part of them. Needs a running
    event loop. Raises ValueError for a price file that is wrong.
    """
    # No other process has this name, not even the next one of this instance.
    writer = f"{instance}.{os.urandom(8).hex()}"
    limiter = Limiter(
        keys,
        wall_clock_s=wall_clock_s,
        n_routers=lambda: len(members.current.with_role(Role.ROUTER)),
        is_shared=database is not None,
        counters=counters,
    )
    ledger = renewal = None
    if database is not None:
        store = UsageStore(database, writer)
        ledger = UsageLedger(store, wall_clock_s=wall_clock_s, counters=counters)
        renewal = LeaseRenewal(limiter, LeaseStore(database, writer), counters)
    tasks = MeteringTasks(renewal, ledger)
    metering = Metering(
        keys,
        names=names,
        limiter=limiter,
        ledger=ledger,
        counters=counters,
        wall_clock_s=wall_clock_s,
        tasks=tasks,
    )
    if prices is not None:
        followed = FollowedFile(prices, read_prices, metering.set_prices, noun="prices")
        tasks.start(followed.run(), "prices")
    if ledger is not None:
        tasks.start(ledger.run(), "usage")
    if renewal is not None:
        tasks.start(renewal.run(), "limits")
    return metering

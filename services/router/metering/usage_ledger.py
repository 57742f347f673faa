"""Usage that is not in the database yet: added to by requests, written in batches in the background.

A router that is killed loses what it has not written: at most the last `USAGE_WRITE_S`, or what the database
did not take before. A router that stops in order writes everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from libs.common.service_bounds import USAGE_WRITE_S
from libs.common.telemetry.counters import Counters
from services.router.metering.usage_query import UsageQuery
from services.router.metering.usage_store import UsageCounts, UsageKey, UsageStore, UsageSum
from slipstream.errors import SlipstreamError

log = logging.getLogger(__name__)


class UsageLedger:
    """Counters of one router. Used by one event loop. Memory is bounded by keys, endpoints and days."""

    def __init__(self, store: UsageStore, *, wall_clock_s: Callable[[], float], counters: Counters) -> None:
        self._store = store
        self._counters = counters
        self._wall_clock_s = wall_clock_s
        self._new: dict[UsageKey, UsageCounts] = {}
        self._batch: dict[UsageKey, UsageCounts] = {}  # sent, and not known to be written
        self._number = 0  # of that batch
        self._writing = asyncio.Lock()
        self._is_failing = False

    @property
    def unwritten_requests(self) -> int:
        """Requests whose usage is not in the database."""
        return sum([counts.requests for part in (self._new, self._batch) for counts in part.values()])

    def add(self, key: UsageKey, counts: UsageCounts) -> None:
        """Count the usage of a request."""
        known = self._new.get(key)
        if known is None:
            self._new[key] = counts
        else:
            known.add(counts)

    async def read(self, query: UsageQuery) -> list[UsageSum]:
        """The sums of a query, with what was counted here until now. Raises what the database raises."""
        await self.write()
        return await self._store.read(query)

    async def run(self) -> None:
        """Write for ever."""
        while True:
            await asyncio.sleep(USAGE_WRITE_S)
            await self.write()

    async def write(self) -> bool:
        """Write what there is; False where the database does not take it, and it stays for the next time.

        A batch that failed is sent again as it was, under its number.
        """
        async with self._writing:
            while self._batch or self._new:
                if not self._batch:
                    self._batch, self._new = self._new, {}
                    self._number += 1
                try:
                    await self._store.add(self._number, self._batch, now_unix_s=self._wall_clock_s())
                except SlipstreamError as error:
                    self._note(error)
                    return False
                self._batch = {}
            self._note(None)
            return True

    def _note(self, error: SlipstreamError | None) -> None:
        self._counters.set("slipstream_usage_unwritten_requests", self.unwritten_requests)
        if error is not None:
            self._counters.add("slipstream_usage_write_failures_total")
        if error is not None and not self._is_failing:
            log.error(
                "usage of %d requests waits for the database: %s", self.unwritten_requests, error.message
            )
        elif error is None and self._is_failing:
            log.info("the usage that waited is in the database")
        self._is_failing = error is not None

"""A node's store with its puts, its background tasks and its metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from libs.common.cluster.worker_service import WorkerService
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.recent_rate import RecentRate
from libs.common.transport.base import KvTransport
from services.kvstore.core.metrics import evicted_and_wanted, tier_metrics
from services.kvstore.core.puts import Puts, constant_term
from services.kvstore.core.store import BlockStore
from services.kvstore.disk.scrub import Scrubber
from services.kvstore.disk.set import DiskSet
from services.kvstore.dram.tier import DramTier
from services.kvstore.policy.admission import DiskAdmission
from services.kvstore.pool.tier import PoolTier
from slipstream.v1 import worker_pb2

EXPIRY_TICK_S = 0.25
FLUSH_S = 10.0


class Node:
    """One node. The owner calls `start` once a loop runs, and `close` at the end."""

    def __init__(
        self,
        dram: DramTier,
        disks: DiskSet | None,
        transport: KvTransport,
        *,
        term: Callable[[], int | None] = constant_term,
        scrub_bytes_per_s: int = 0,
        admission: DiskAdmission | None = None,
        pool: PoolTier | None = None,
        counters: Counters | None = None,
    ) -> None:
        self._transport = transport
        counters = counters or Counters()
        self._lacked = RecentRate()  # blocks evicted and then wanted
        self.store = BlockStore(dram, disks, counters, now_ms=now_ms, admission=admission, pool=pool)
        self.puts = Puts(self.store, transport, counters, now_ms=now_ms, term=term)
        self._scrubbers = [
            Scrubber(tier, bytes_per_s=scrub_bytes_per_s)
            for tier in (disks.tiers if disks is not None else ())
        ]
        self._expiry: asyncio.Task[None] | None = None

    def start(self, worker: WorkerService) -> None:
        """Start the background work."""
        self.store.start()
        for scrubber in self._scrubbers:
            scrubber.start()
        self._expiry = asyncio.create_task(self._expire_forever(worker))

    def ledger(self) -> worker_pb2.Ledger:
        """Leases and transfers that are open now."""
        return worker_pb2.Ledger(
            blocks_held=self.store.pinned_blocks + self.puts.reserved_blocks,
            pins=self.store.pins,
            reservations=self.puts.reservations,
            transfers=self._transport.reads_in_flight,
            blocks_leaked=self.store.leaked_blocks,
        )

    def load(self) -> worker_pb2.LoadReport:
        """Room in memory, in blocks of the size last used."""
        table = self.store.dram.table
        wanted_blocks, block_bytes = evicted_and_wanted(self.store)
        lacked_per_s = self._lacked.per_s(now_ms() / 1e3, wanted_blocks)
        return worker_pb2.LoadReport(
            requests_running=self.store.pins + self.puts.reservations,
            blocks_free=table.n_free,
            blocks_cached=table.n_evictable,
            blocks_held=self.store.pinned_blocks + self.puts.reserved_blocks,
            evicted_wanted_bytes_per_s=lacked_per_s * block_bytes,
        )

    def measure(self) -> dict[str, float]:
        """The gauges and counters of the tiers, by metric name."""
        return {
            **tier_metrics(self.store),
            "slipstream_requests_running": self.store.pins + self.puts.reservations,
            "slipstream_kv_quarantined_bytes": self._transport.quarantined_bytes,
        }

    async def close(self) -> None:
        """Write what the disk queue holds and end the background work."""
        if self._expiry is not None:
            self._expiry.cancel()
            await asyncio.gather(self._expiry, return_exceptions=True)
        for scrubber in self._scrubbers:
            await scrubber.close()
        await self.store.close(flush_timeout_s=FLUSH_S)
        if self.store.disk is not None:
            await asyncio.to_thread(self.store.disk.close)

    async def _expire_forever(self, worker: WorkerService) -> None:
        while True:
            await asyncio.sleep(EXPIRY_TICK_S)
            if self.store.expire() + self.puts.expire() + self.store.drop_unreachable():
                worker.load_changed()


def now_ms() -> float:
    """The clock of a node."""
    return time.monotonic() * 1000

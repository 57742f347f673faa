"""The metrics of the cluster in one text: those of this router and of every worker that it sees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from libs.common.telemetry.counters import Counters, metric_of
from libs.common.telemetry.exposition import Sample, render_prometheus
from libs.common.telemetry.metric_table import METRIC_NAMES
from services.router.workers.connection import WorkerConnection
from services.router.workers.fleet import RouterFleet

MAX_AGE_S = 2.0


class Metrics:
    """Asks the workers at most every MAX_AGE_S seconds, however often a client reads the text."""

    def __init__(
        self,
        counters: Counters,
        fleet: RouterFleet,
        *,
        instance: str,
        clock: Callable[[], float],
        gauges: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        """`gauges` returns what this router measures of itself when the text is rendered."""
        self._counters = counters
        self._fleet = fleet
        self._instance = instance
        self._clock = clock
        self._gauges = gauges
        self._asking = asyncio.Lock()
        self._asked_s = float("-inf")
        self._workers: list[Sample] = []

    async def render(self) -> str:
        """The metrics in Prometheus' text format."""
        async with self._asking:
            if self._clock() - self._asked_s > MAX_AGE_S:
                links = [link for link in self._fleet.links() if link.ready]
                found = await asyncio.gather(*map(_ask, links))
                self._workers = [sample for sample in found if sample is not None]
                self._asked_s = self._clock()
        own: dict[str, float] = {
            **self._counters.snapshot(),
            **self._gauges(),
            "slipstream_workers": float(sum(link.ready for link in self._fleet.links())),
        }
        return render_prometheus([({"role": "router", "instance": self._instance}, own), *self._workers])


async def _ask(link: WorkerConnection) -> Sample | None:
    status = await link.status()
    if status is None:
        return None
    values = {name: value for name, value in status.counters.items() if metric_of(name) in METRIC_NAMES}
    values["slipstream_kv_blocks_leaked"] = float(status.ledger.blocks_leaked)
    return {"role": link.worker.role.value, "instance": link.worker.instance}, values

"""The metrics of one process: what it counts, and what it measures when a reader asks."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Mapping

from libs.common.runtime import heap
from libs.common.telemetry.counters import Counters
from libs.common.telemetry.exposition import render_metrics
from slipstream import __version__


class ProcessMetrics:
    """Owned by a process's `main`; read by its admin port, by GetStatus and by the OTLP exporter."""

    def __init__(
        self, service: str, counters: Counters, measure: Callable[[Counters], Mapping[str, float]]
    ) -> None:
        """`measure` returns gauges by name; it sets those with labels itself."""
        self.service = service
        self.counters = counters
        self.model = ""  # the name for clients, once it is known: vLLM's metrics have it as a label
        self._measure = measure
        counters.set("slipstream_build_info", 1, (__version__, platform.python_version()))

    def snapshot(self) -> dict[str, float]:
        """All values now, as `Counters.snapshot` names them."""
        self.measure()
        return self.counters.snapshot()

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The text of /metrics and its content type, as last measured. May run on any thread."""
        return render_metrics(self.counters, service=self.service, model=self.model, accept=accept)

    def measure(self) -> None:
        """Bring the gauges up to date."""
        self.counters.set("slipstream_event_loop_tasks", len(asyncio.all_tasks()))
        for name, value in (heap.figures() | dict(self._measure(self.counters))).items():
            self.counters.set(name, value)

"""Sends a process's metrics by OTLP at an interval: the values of its counters, not a second count."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    DataT,
    Gauge,
    HistogramDataPoint,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramData
from opentelemetry.sdk.metrics.export import Metric as ExportedMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from libs.common.telemetry.counters import BucketExemplar, Counters, Histogram, Labels
from libs.common.telemetry.metric_tables.table import METRICS, zero_metrics
from libs.common.telemetry.process_metrics import ProcessMetrics
from libs.common.worker_bounds import LAST_METRICS_S

log = logging.getLogger(__name__)

_INTERVAL_MS = 60_000.0
_SCOPE = InstrumentationScope("slipstream")
_UNKNOWN: Any = None  # the encoder leaves it out
_CUMULATIVE = AggregationTemporality.CUMULATIVE
# Names of OpenTelemetry's conventions for generative AI, beside ours.
GEN_AI_NAMES = {
    "slipstream_request_duration_seconds": "gen_ai.server.request.duration",
    "slipstream_time_to_first_token_seconds": "gen_ai.server.time_to_first_token",
    "slipstream_inter_token_latency_seconds": "gen_ai.server.time_per_output_token",
}
PROVIDER = "slipstream"


class MetricsExport:
    """One exporter. A collector that is unavailable costs the process a line in the log."""

    def __init__(
        self,
        metrics: ProcessMetrics,
        exporter: MetricExporter,
        resource: Resource,
        *,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._metrics = metrics
        self._exporter = exporter
        self._resource = resource
        self._clock_ns = clock_ns
        self._began_ns = clock_ns()

    @contextlib.asynccontextmanager
    async def running(self, environment: Mapping[str, str]) -> AsyncIterator[None]:
        """Send at the environment's interval meanwhile, and once more at the end."""
        interval_ms = float(environment.get("OTEL_METRIC_EXPORT_INTERVAL", _INTERVAL_MS))
        task = asyncio.create_task(self.run(interval_s=interval_ms / 1e3), name="metrics-export")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_METRICS_S):
                    await self.send()

    async def run(self, *, interval_s: float) -> None:
        """Send at the interval until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            await self.send()

    async def send(self) -> None:
        """Measure and send once; the call to the collector runs on a thread."""
        self._metrics.measure()
        data = metrics_data(
            self._metrics.counters,
            self._resource,
            service=self._metrics.service,
            model=self._metrics.model,
            began_ns=self._began_ns,
            now_ns=self._clock_ns(),
        )
        result = await asyncio.to_thread(self._exporter.export, data)
        if result is not MetricExportResult.SUCCESS:
            log.warning("the metrics were not exported")


def metrics_data(
    counters: Counters, resource: Resource, *, service: str, model: str, began_ns: int, now_ns: int
) -> MetricsData:
    """The values as OpenTelemetry's data: cumulative sums, gauges and histograms. Pure.

    Counters and histograms of `service` that have no value yet are 0.
    """
    points = _Points(began_ns, now_ns)
    zeros = zero_metrics(service, counters.names())
    values = [*counters.values(), *((each.name, (), 0) for each in zeros if not each.buckets)]
    distributions = [
        *counters.histograms(),
        *((each.name, (), Histogram.of(each.buckets)) for each in zeros if each.buckets),
    ]
    numbers: dict[str, list[NumberDataPoint]] = {}
    for name, labels, value in values:
        numbers.setdefault(name, []).append(points.number(_attributes(name, labels), value))
    histograms: dict[str, list[HistogramDataPoint]] = {}
    for name, labels, histogram in distributions:
        histograms.setdefault(name, []).append(points.histogram(_attributes(name, labels), histogram))
        if name in GEN_AI_NAMES:
            named = {"gen_ai.provider.name": PROVIDER, "gen_ai.request.model": model}
            histograms[GEN_AI_NAMES[name]] = [points.histogram(named, histogram)]
    exported = [_exported(name, _number_data(name, found)) for name, found in numbers.items()]
    exported += [_exported(name, HistogramData(found, _CUMULATIVE)) for name, found in histograms.items()]
    scope = ScopeMetrics(_SCOPE, exported, "")
    return MetricsData([ResourceMetrics(resource, [scope], "")])


class _Points:
    """Makes data points of one moment."""

    def __init__(self, began_ns: int, now_ns: int) -> None:
        self._began_ns = began_ns
        self._now_ns = now_ns

    def number(self, attributes: Mapping[str, str], value: float) -> NumberDataPoint:
        return NumberDataPoint(dict(attributes), self._began_ns, self._now_ns, value)

    def histogram(self, attributes: Mapping[str, str], histogram: Histogram) -> HistogramDataPoint:
        return HistogramDataPoint(
            attributes=dict(attributes),
            start_time_unix_nano=self._began_ns,
            time_unix_nano=self._now_ns,
            count=histogram.count,
            sum=histogram.sum,
            bucket_counts=list(histogram.counts),
            explicit_bounds=histogram.ends,
            min=_UNKNOWN,
            max=_UNKNOWN,
            exemplars=[_exemplar(found) for _, found in sorted(histogram.exemplars.items())],
        )


def _exemplar(found: BucketExemplar) -> Exemplar:
    return Exemplar({}, found.value, found.at_unix_ns, span_id=found.span_id, trace_id=found.trace_id)


def _number_data(name: str, points: list[NumberDataPoint]) -> DataT:
    if METRICS[name].kind == "counter":
        return Sum(points, _CUMULATIVE, is_monotonic=True)
    return Gauge(points)


def _exported(name: str, data: DataT) -> ExportedMetric:
    source = next((ours for ours, theirs in GEN_AI_NAMES.items() if theirs == name), name)
    unit = "s" if "_seconds" in source else "By" if "_bytes" in source else "1"
    return ExportedMetric(name, METRICS[source].help, unit, data)


def _attributes(name: str, labels: Labels) -> dict[str, str]:
    return dict(zip(METRICS[name].labels, labels, strict=True))

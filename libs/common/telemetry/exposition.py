"""Metrics as text in Prometheus' format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import Metric as MetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from libs.common.telemetry.metric_table import METRICS, Metric

Sample = tuple[Mapping[str, str], Mapping[str, float]]  # labels of one process, its values by metric name


def render_prometheus(samples: Sequence[Sample]) -> str:
    """The values of several processes in Prometheus' text format."""
    return generate_latest(_Exposition(samples)).decode()


class _Exposition(Collector):
    """Gives prometheus_client the table's metrics with the values of `samples`."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self._samples = samples

    def collect(self) -> Iterator[MetricFamily]:
        """The metrics that have a value, in the order of the table."""
        for metric in METRICS:
            # prometheus_client adds the suffix of a counter itself.
            family = MetricFamily(metric.name.removesuffix("_total"), metric.help, metric.kind)
            for labels, values in self._samples:
                if metric.buckets:
                    _add_histogram(family, metric, labels, values)
                elif metric.name in values:
                    family.add_sample(metric.name, dict(labels), values[metric.name])
            if family.samples:
                yield family


def _add_histogram(
    family: MetricFamily, metric: Metric, labels: Mapping[str, str], values: Mapping[str, float]
) -> None:
    if f"{metric.name}|sum" not in values:
        return
    count = 0.0
    for end in (*metric.buckets, math.inf):
        count += values.get(f"{metric.name}|{end:g}", 0.0)
        family.add_sample(f"{metric.name}_bucket", {**labels, "le": floatToGoString(end)}, count)  # type: ignore[no-untyped-call]
    family.add_sample(f"{metric.name}_count", dict(labels), count)
    family.add_sample(f"{metric.name}_sum", dict(labels), values[f"{metric.name}|sum"])

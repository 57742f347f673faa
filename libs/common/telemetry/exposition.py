"""Metrics as text, in Prometheus' format or OpenMetrics, whichever the reader asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from opentelemetry.trace import format_span_id, format_trace_id
from prometheus_client import ProcessCollector
from prometheus_client.core import Metric as MetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from libs.common.telemetry.counters import BucketExemplar, Counters, Histogram, Labels
from libs.common.telemetry.metric_tables.aliases import ALIASES, MODEL_LABEL
from libs.common.telemetry.metric_tables.metric import Metric
from libs.common.telemetry.metric_tables.table import METRICS, zero_metrics

# CPU, memory, descriptors and start time of this process, by the names of Prometheus' client libraries.
_PROCESS = ProcessCollector(registry=None)


def render_metrics(
    counters: Counters, *, service: str = "", model: str = "", accept: str = ""
) -> tuple[bytes, str]:
    """The text for a reader whose Accept header is `accept`, and its content type.

    Counters and histograms of `service` that have no value yet are 0. With a `model` the text has vLLM's
    names too. OpenMetrics has the exemplars.
    """
    encode, content_type = choose_encoder(accept)
    return encode(_Exposition(counters, service, model)), content_type


class _Exposition(Collector):
    """Gives prometheus_client the table's metrics with the values of `counters`."""

    def __init__(self, counters: Counters, service: str, model: str) -> None:
        self._counters = counters
        self._service = service
        self._model = model

    def collect(self) -> Iterator[MetricFamily]:
        """The metrics that have a value, in the order of the table; then their aliases, then the process."""
        families = {metric.name: _family(metric) for metric in METRICS.values()}
        for metric in zero_metrics(self._service, self._counters.names()):
            _start_at_zero(families[metric.name], metric)
        for name, labels, value in self._counters.values():
            families[name].add_sample(name, _named(METRICS[name], labels), value)
        for name, labels, histogram in self._counters.histograms():
            _add_histogram(families[name], name, _named(METRICS[name], labels), histogram)
        found = [family for family in families.values() if family.samples]
        yield from found
        if self._model:
            yield from _aliases({family.name: family for family in found}, self._model)
        if self._service:
            yield from _PROCESS.collect()


def _family(metric: Metric) -> MetricFamily:
    # prometheus_client adds the suffix of a counter itself.
    return MetricFamily(metric.name.removesuffix("_total"), metric.help, metric.kind)


def _start_at_zero(family: MetricFamily, metric: Metric) -> None:
    if metric.buckets:
        _add_histogram(family, metric.name, {}, Histogram.of(metric.buckets))
    else:
        family.add_sample(metric.name, {}, 0)


def _add_histogram(family: MetricFamily, name: str, labels: Mapping[str, str], histogram: Histogram) -> None:
    count = 0
    for bucket, end in enumerate((*histogram.ends, math.inf)):
        count += histogram.counts[bucket]
        family.add_sample(
            f"{name}_bucket",
            {**labels, "le": floatToGoString(end)},  # type: ignore[no-untyped-call]
            count,
            exemplar=_exemplar(histogram.exemplars.get(bucket)),
        )
    family.add_sample(f"{name}_count", dict(labels), count)
    family.add_sample(f"{name}_sum", dict(labels), histogram.sum)


def _exemplar(found: BucketExemplar | None) -> Exemplar | None:
    if found is None:
        return None
    ids = {"trace_id": format_trace_id(found.trace_id), "span_id": format_span_id(found.span_id)}
    return Exemplar(ids, found.value, found.at_unix_ns / 1e9)


def _named(metric: Metric, labels: Labels) -> dict[str, str]:
    return dict(zip(metric.labels, labels, strict=True))


def _aliases(families: Mapping[str, MetricFamily], model: str) -> Iterable[MetricFamily]:
    """The families under vLLM's names, with the model's name as a label."""
    for alias in ALIASES:
        source = families.get(alias.source.removesuffix("_total"))
        if source is None:
            continue
        family = MetricFamily(
            alias.name.removesuffix("_total"), f"As {alias.source}. {source.documentation}", source.type
        )
        for sample in source.samples:
            if alias.only is not None and sample.labels.get(alias.only[0]) != alias.only[1]:
                continue
            labels = {
                alias.labels.get(name, name): value
                for name, value in sample.labels.items()
                if alias.only is None or name != alias.only[0]
            }
            name = family.name + sample.name.removeprefix(source.name)
            family.add_sample(name, {**labels, **alias.adds, MODEL_LABEL: model}, sample.value)
        if family.samples:
            yield family

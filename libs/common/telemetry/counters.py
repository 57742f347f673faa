"""The values of one process's metrics. Services keep plain totals; no call is made per token."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from opentelemetry.trace import SpanContext

from libs.common.telemetry.metric_tables.table import METRICS

Labels = tuple[str, ...]
_Series = tuple[str, Labels]  # a metric's name, and the values of its labels in the table's order


@dataclass(frozen=True, slots=True)
class BucketExemplar:
    """A value of a bucket that was observed in a span, and when."""

    value: float
    trace_id: int
    span_id: int
    at_unix_ns: int


@dataclass(slots=True)
class Histogram:
    """The values of one series. `exemplars`: the last one of each bucket, if any."""

    ends: tuple[float, ...]
    counts: list[int]  # of each bucket alone; the last one has no end
    sum: float = 0.0
    exemplars: dict[int, BucketExemplar] = field(default_factory=dict)

    @classmethod
    def of(cls, ends: tuple[float, ...]) -> Histogram:
        """An empty one with these upper ends."""
        return cls(ends, [0] * (len(ends) + 1))

    @property
    def count(self) -> int:
        """How many values it has."""
        return sum(self.counts)


class Counters:
    """Totals, gauges and histograms of one process by metric name. Names outside the table raise KeyError.

    Totals stay whole numbers, of any size, while whole numbers are added.
    """

    def __init__(self, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        """`clock_ns`: the wall clock, which dates exemplars."""
        self._clock_ns = clock_ns
        self._values: dict[_Series, float] = {}
        self._histograms: dict[_Series, Histogram] = {}

    def add(self, name: str, amount: float = 1, labels: Labels = ()) -> None:
        """Increase a counter."""
        try:
            self._values[name, labels] += amount
        except KeyError:
            self.set(name, amount, labels)

    def set(self, name: str, value: float, labels: Labels = ()) -> None:
        """Set a gauge, or a total that is counted elsewhere."""
        if (name, labels) not in self._values:
            _check(name, labels)
        self._values[name, labels] = value

    def replace(self, name: str, values: Mapping[Labels, float]) -> None:
        """Set a gauge with labels: series that `values` lacks end."""
        for series in [series for series in self._values if series[0] == name]:
            if series[1] not in values:
                del self._values[series]
        for labels, value in values.items():
            self.set(name, value, labels)

    def observe(
        self,
        name: str,
        value: float,
        labels: Labels = (),
        *,
        count: int = 1,
        span: SpanContext | None = None,
    ) -> None:
        """Add `count` equal values to a histogram. `span` is the exported one that they come from."""
        histogram = self._histograms.get((name, labels))
        if histogram is None:
            histogram = self._open(name, labels)
        bucket = bisect_left(histogram.ends, value)
        histogram.counts[bucket] += count
        histogram.sum += value * count
        if span is not None:
            histogram.exemplars[bucket] = BucketExemplar(
                value, span.trace_id, span.span_id, at_unix_ns=self._clock_ns()
            )

    def names(self) -> frozenset[str]:
        """The metrics that have a value."""
        return frozenset(name for name, _ in (*self._values, *self._histograms))

    def values(self) -> Iterator[tuple[str, Labels, float]]:
        """All totals and gauges: name, values of the labels, value."""
        for (name, labels), value in list(self._values.items()):
            yield name, labels, value

    def histograms(self) -> Iterator[tuple[str, Labels, Histogram]]:
        """All histograms: name, values of the labels, the histogram."""
        for (name, labels), histogram in list(self._histograms.items()):
            yield name, labels, histogram

    def total(self, name: str) -> float:
        """The value of a counter without labels; 0 before it was counted."""
        return self._values.get((name, ()), 0)

    def snapshot(self) -> dict[str, float]:
        """All values by series, `name` or `name{label="value"}`; of a histogram `name_count`, `name_sum`.

        A counter with labels also has its sum under its bare name.
        """
        found: dict[str, float] = {}
        for name, labels, value in self.values():
            found[_series_name(name, labels)] = value
            if labels and METRICS[name].kind == "counter":
                found[name] = found.get(name, 0) + value
        for name, labels, histogram in self.histograms():
            found[_series_name(name, labels, "_count")] = histogram.count
            found[_series_name(name, labels, "_sum")] = histogram.sum
        return found

    def _open(self, name: str, labels: Labels) -> Histogram:
        _check(name, labels)
        if not METRICS[name].buckets:
            raise KeyError(f"{name} is no histogram")
        histogram = self._histograms[name, labels] = Histogram.of(METRICS[name].buckets)
        return histogram


def _check(name: str, labels: Labels) -> None:
    if name not in METRICS:
        raise KeyError(f"{name} is not in the metric table")
    if len(labels) != len(METRICS[name].labels):
        raise KeyError(f"{name} has the labels {METRICS[name].labels}, not {len(labels)} values")


def _series_name(name: str, labels: Labels, suffix: str = "") -> str:
    if not labels:
        return f"{name}{suffix}"
    pairs = ",".join(f'{label}="{value}"' for label, value in zip(METRICS[name].labels, labels, strict=True))
    return f"{name}{suffix}{{{pairs}}}"

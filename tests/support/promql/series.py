"""Samples by series, as a server of Prometheus keeps them."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from tests.support.promql.syntax import Selector

LOOKBACK_S = 300.0  # an older sample does not count as the present one
NAME = "__name__"
Labels = frozenset[tuple[str, str]]
Samples = list[tuple[float, float]]  # (time, value) in the order of time; NaN: the series ends here


@dataclass(slots=True)
class Series:
    """The samples of a name, by labels without the name."""

    of_name: dict[str, dict[Labels, Samples]] = field(default_factory=dict)

    def add(self, name: str, labels: Mapping[str, str], at_s: float, value: float) -> None:
        """Append a sample. Samples of one series are added in the order of their times."""
        of_labels = self.of_name.setdefault(name, {})
        of_labels.setdefault(frozenset(labels.items()), []).append((at_s, value))

    def add_scrape(self, text: str, labels: Mapping[str, str], at_s: float) -> None:
        """Append a scrape of a process. `labels` are those of its target, such as `instance`."""
        self.add("up", labels, at_s, 1.0)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.add(sample.name, {**sample.labels, **labels}, at_s, sample.value)

    def add_notation(self, series: str, values: str, interval_s: float) -> None:
        """Append samples in promtool's notation, such as `name{a="b"}` and `0+1x20 3x4 stale`."""
        found = re.fullmatch(r"([\w:]+)(?:\{(.*)\})?", series)
        assert found is not None, series
        labels = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
        for number, value in enumerate(_expanded(values)):
            if value is not None:
                self.add(found[1], labels, number * interval_s, value)

    def now(self, selector: Selector, at_s: float) -> dict[Labels, float]:
        """The present value of each series that the selector takes."""
        at_s -= selector.offset_s
        found: dict[Labels, float] = {}
        for labels, samples in self._selected(selector):
            number = bisect_right(samples, at_s, key=_at_s)
            if number and samples[number - 1][0] > at_s - LOOKBACK_S:
                value = samples[number - 1][1]
                if not math.isnan(value):
                    found[labels] = value
        return found

    def ranges(self, selector: Selector, at_s: float) -> dict[Labels, Samples]:
        """The samples of each series in the time that the selector takes; none without a sample."""
        at_s -= selector.offset_s
        found: dict[Labels, Samples] = {}
        for labels, samples in self._selected(selector):
            begin = bisect_right(samples, at_s - selector.range_s, key=_at_s)
            inside = samples[begin : bisect_right(samples, at_s, key=_at_s)]
            kept = [sample for sample in inside if not math.isnan(sample[1])]
            if kept:
                found[labels] = kept
        return found

    def _selected(self, selector: Selector) -> Iterable[tuple[Labels, Samples]]:
        for labels, samples in self.of_name.get(selector.name, {}).items():
            values = dict(labels)
            if all(_matches(values.get(label, ""), how, value) for label, how, value in selector.matchers):
                yield labels, samples


def _at_s(sample: tuple[float, float]) -> float:
    return sample[0]


def _matches(found: str, operator: str, wanted: str) -> bool:
    equal = re.fullmatch(wanted, found) is not None if "~" in operator else found == wanted
    return equal != operator.startswith("!")


def _expanded(values: str) -> Iterable[float | None]:
    for part in values.split():
        if part in ("_", "stale"):
            yield None if part == "_" else math.nan
            continue
        if (gap := re.fullmatch(r"_x(\d+)", part)) is not None:
            yield from [None] * int(gap[1])
            continue
        found = re.fullmatch(r"(-?[\d.]+)(?:([+-][\d.]+))?(?:x(\d+))?", part)
        assert found is not None, part
        for number in range(int(found[3] or 0) + 1):
            yield float(found[1]) + number * float(found[2] or 0)

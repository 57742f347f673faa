"""The values of one process's metrics. Services keep plain totals; no call is made per token."""

from __future__ import annotations

import math

from libs.common.telemetry.metric_table import BUCKETS, METRIC_NAMES


class Counters:
    """Totals and gauges of one process by metric name. Names outside the table raise KeyError."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Increase a counter. Raises KeyError for a name that is not in the table."""
        try:
            self._values[name] += amount
        except KeyError:
            self.set(name, amount)

    def set(self, name: str, value: float) -> None:
        """Set a gauge. Raises KeyError for a name that is not in the table."""
        if name not in METRIC_NAMES:
            raise KeyError(f"{name} is not in the metric table")
        self._values[name] = value

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram. Raises KeyError for any other name."""
        le = next((end for end in BUCKETS[name] if value <= end), math.inf)
        for part, amount in ((f"{le:g}", 1.0), ("sum", value)):
            key = f"{name}|{part}"
            self._values[key] = self._values.get(key, 0.0) + amount

    def snapshot(self) -> dict[str, float]:
        """A copy of all values. A histogram's keys are `name|upper end` for each bucket and `name|sum`."""
        return dict(self._values)


def metric_of(key: str) -> str:
    """The table's name for a key of a snapshot."""
    return key.partition("|")[0]

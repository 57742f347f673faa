"""One row of the metric table, and the buckets that rows share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: `kind` is counter, gauge or histogram; a counter's name ends in _total.

    `labels` have few values that the code knows, never a client's words. `buckets` are the upper ends of a
    histogram's buckets but the last, which has none.
    """

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def counter(name: str, help: str, *labels: str) -> Metric:
    """A row for a total that only grows."""
    return Metric(f"slipstream_{name}", "counter", help, labels)


def gauge(name: str, help: str, *labels: str) -> Metric:
    """A row for a value that rises and falls."""
    return Metric(f"slipstream_{name}", "gauge", help, labels)


def histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    """A row for a distribution."""
    return Metric(f"slipstream_{name}", "histogram", help, labels, buckets)


# Seconds: of steps and tokens, of waits within a request, of whole requests.
STEP_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
WAIT_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
REQUEST_S = (
    *(0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0),
)
REFUSAL_S = (
    *(0.0001, 0.0002, 0.0003, 0.0005, 0.0007, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.007),
    *(0.01, 0.02, 0.05, 0.1, 1.0),
)
N_TOKENS = tuple(
    float(factor * 10**power) for power in range(6) for factor in (1, 2, 5) if factor * 10**power <= 200_000
)

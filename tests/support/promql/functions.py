"""The functions of PromQL that rules and dashboards call, computed as Prometheus does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

from tests.support.promql.series import NAME, Labels, Samples


def _increase(samples: Samples, start_s: float, end_s: float) -> float | None:
    """The growth of a counter in the time, extrapolated to its ends; None for fewer than two samples."""
    if len(samples) < 2:
        return None
    (first_s, first), (last_s, last) = samples[0], samples[-1]
    resets = math.fsum(before for (_, before), (_, now) in itertools.pairwise(samples) if now < before)
    grown, sampled_s = last - first + resets, last_s - first_s
    to_start_s, to_end_s = first_s - start_s, end_s - last_s
    if grown > 0 and first >= 0:  # a counter begins at 0
        to_start_s = min(to_start_s, sampled_s * first / grown)
    mean_s = sampled_s / (len(samples) - 1)
    covered_s = sampled_s
    for gap_s in (to_start_s, to_end_s):
        covered_s += gap_s if gap_s < mean_s * 1.1 else mean_s / 2
    return grown * covered_s / sampled_s


def _rate(samples: Samples, start_s: float, end_s: float) -> float | None:
    grown = _increase(samples, start_s, end_s)
    return None if grown is None else grown / (end_s - start_s)


def _changes(samples: Samples, *_: float) -> float:
    return float(sum(before != now for (_, before), (_, now) in itertools.pairwise(samples)))


def _quantile(quantile: float, vector: Mapping[Labels, float]) -> dict[Labels, float]:
    """histogram_quantile: of cumulative buckets by `le`, linear inside a bucket."""
    groups: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in vector.items():
        end = dict(labels).get("le")
        if end is not None:
            kept = frozenset(pair for pair in labels if pair[0] not in ("le", NAME))
            groups.setdefault(kept, []).append((float(end), count))
    return {labels: _of_buckets(quantile, sorted(buckets)) for labels, buckets in groups.items()}


def _of_buckets(quantile: float, buckets: list[tuple[float, float]]) -> float:
    if len(buckets) < 2 or not math.isinf(buckets[-1][0]) or not buckets[-1][1]:
        return math.nan
    rank, start, below = quantile * buckets[-1][1], 0.0, 0.0
    for end, count in buckets[:-1]:
        if count >= rank:
            return start + (end - start) * (rank - below) / (count - below) if count > below else end
        start, below = end, count
    return buckets[-2][0]


# Of the samples of a series, and the ends of the time.
OVER_TIME: Mapping[str, Callable[[Samples, float, float], float | None]] = {
    "increase": _increase,
    "rate": _rate,
    "changes": _changes,
    "max_over_time": lambda samples, *_: max(value for _, value in samples),
    "min_over_time": lambda samples, *_: min(value for _, value in samples),
}
VECTORS: Mapping[str, Callable[[float, Mapping[Labels, float]], dict[Labels, float]]] = {
    "histogram_quantile": _quantile
}
NUMBERS: Mapping[str, Callable[[float, float], float]] = {"clamp_min": max, "clamp_max": min}

"""Runs of two variants side by side: medians over the rounds, and the ratio of first to second. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

# What is compared: title, path in a run's report, whether less is better.
FIGURES: Sequence[tuple[str, tuple[str, ...], bool]] = (
    *((f"time between tokens {p}, ms", ("itl_ms", p), True) for p in ("p50", "p90", "p99")),
    *((f"a request's time per token {p}, ms", ("time_per_token_ms", p), True) for p in ("p50", "p90", "p99")),
    ("TTFT p50, ms", ("ttft_ms", "p50"), True),
    ("TTFT p90, ms", ("ttft_ms", "p90"), True),
    ("TTFT p99, ms", ("ttft_ms", "p99"), True),
    ("goodput, share of requests", ("goodput_share",), False),
    ("cached share of prompts", ("cached_share",), False),
    ("tokens/s", ("completion_tokens_per_s",), False),
    ("failed requests", ("failed",), True),
)

Report = Mapping[str, Any]


def compare(first: Sequence[Report], second: Sequence[Report]) -> list[dict[str, Any]]:
    """One row for each figure: the medians of both variants, and their ratio where it has one."""
    rows = []
    for title, path, less_is_better in FIGURES:
        one, other = (_median(reports, path) for reports in (first, second))
        ratio = round(one / other, 3) if one is not None and other else None
        rows.append(
            {"figure": title, "first": one, "second": other, "ratio": ratio, "less_is_better": less_is_better}
        )
    return rows


def knee(rows_by_rate: Mapping[float, Sequence[Mapping[str, Any]]], *, least_share: float) -> float | None:
    """The smallest rate at which the second variant's goodput is under `least_share`; None: at no rate."""
    for rate, rows in sorted(rows_by_rate.items()):
        share = next(row["second"] for row in rows if row["figure"].startswith("goodput"))
        if share is not None and share < least_share:
            return rate
    return None


def as_table(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'':34}{names[0]:>14}{names[1]:>14}{'ratio':>10}"]
    for row in rows:
        values = [_text(row[key]) for key in ("first", "second", "ratio")]
        lines.append(f"{row['figure']:34}{values[0]:>14}{values[1]:>14}{values[2]:>10}")
    return "\n".join(lines)


def _median(reports: Sequence[Report], path: Sequence[str]) -> float | None:
    found = []
    for report in reports:
        value: Any = report
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            found.append(float(value))
    return round(statistics.median(found), 3) if found else None


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"

"""Medians of several rounds, and ratios of two routers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

SMG = "smg"
_COMPARED = (
    ("requests_per_s",),
    ("tokens_per_router_cpu_s",),
    ("router_cpu_ms_per_request",),
    ("ttft_ms", "p50"),
    ("ttft_ms", "p99"),
    ("beyond_prefill_ms", "p50"),
    ("beyond_prefill_ms", "p99"),
    ("total_ms", "p50"),
    ("total_ms", "p99"),
)


def median_row(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each figure that all rows have."""
    found: dict[str, Any] = {}
    for name, value in rows[0].items():
        values = [row[name] for row in rows if name in row]
        if len(values) < len(rows):
            continue
        found[name] = (
            median_row(values) if isinstance(value, Mapping) else round(statistics.median(values), 3)
        )
    return found


def ratios(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Each row's figures divided by SMG's; figures that one of the two lacks, or that are 0, are left out.

    Above 1 our router leads in the figures `..._per_s`, and trails in the others."""
    if SMG not in rows:
        return {}
    found: dict[str, Any] = {}
    for name, row in rows.items():
        pairs = {"_".join(path): (_at(row, path), _at(rows[SMG], path)) for path in _COMPARED}
        if name != SMG:
            found[name] = {what: round(our / its, 3) for what, (our, its) in pairs.items() if our and its}
    return {"ratio_to_smg": found}


def _at(row: Mapping[str, Any], path: Sequence[str]) -> float | None:
    value: Any = row
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return None if value is None else float(value)

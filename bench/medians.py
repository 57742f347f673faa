"""Medians of the rows of repeated rounds, and their print. Pure but for the print."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence


def medians_of(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each column, to three digits. The columns are those of the first row."""
    return {name: float(f"{statistics.median(row[name] for row in rows):.3g}") for name in rows[0]}


def print_medians(found: Mapping[str, Mapping[str, float]], *, as_json: bool) -> None:
    """A line for each side, or one JSON document."""
    if as_json:
        print(json.dumps(found))
        return
    for side, medians in found.items():
        print(f"{side:6}", "  ".join(f"{name} {value:g}" for name, value in medians.items()))

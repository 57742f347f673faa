"""The table of clients in docs/api.md, made from the results of `make test-clients`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
BEGIN = "<!-- clients: begin, made from tests/clients/results.json; do not edit -->"
END = "<!-- clients: end -->"
_WORDS = {"works": "yes", "fails": "**no**", "not served": "not served", "not offered": "–"}


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """One row a client, one column a scenario."""
    scenarios = list(reports[0]["results"])
    lines = [
        f"| Client | Version | Endpoint | {' | '.join(scenarios)} |",
        f"|{' --- |' * (3 + len(scenarios))}",
    ]
    for report in reports:
        words = [_WORDS[report["results"][scenario]["status"]] for scenario in scenarios]
        cells = [report["client"], report["version"], f"`{report['endpoint']}`", *words]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def render(page: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """The page with the table between its two marks. Raises ValueError where a mark is missing."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(reports)}\n{END}{after}"

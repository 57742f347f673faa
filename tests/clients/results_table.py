"""The table of clients in docs/api.md, made from the results of `make test-clients`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
BEGIN = "<!-- clients: begin, made from tests/clients/results.json; do not edit -->"
END = "<!-- clients: end -->"


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """One row a client, with the scenarios that it does not pass."""
    lines = ["| Client | Version | Endpoint | Passes |", "| --- | --- | --- | --- |"]
    for report in reports:
        statuses = {name: result["status"] for name, result in report["results"].items()}
        others = [f"{name} ({status})" for name, status in statuses.items() if status != "works"]
        passes = f"all but {', '.join(others)}" if others else "all"
        lines.append(f"| {report['client']} | {report['version']} | `{report['endpoint']}` | {passes} |")
    return "\n".join(lines)


def render(page: str, reports: Sequence[Mapping[str, Any]]) -> str:
    """The page with the table between its two marks. Raises ValueError where a mark is missing."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table(reports)}\n{END}{after}"

"""The table of clients in docs/api.md is that of the stored results, and the lists of packages are whole."""

from __future__ import annotations

import json

from tests.clients.client_scripts import HERE, RESULTS, SCENARIOS, SCRIPTS
from tests.clients.results_table import PAGE, render, table

REPORTS = json.loads(RESULTS.read_text())


def test_the_page_has_the_table_of_the_stored_results() -> None:
    page = PAGE.read_text()
    assert render(page, REPORTS) == page
    others = [{**report, "version": "0.0.0"} for report in REPORTS]
    assert render(page, others) != page


def test_the_stored_results_are_of_all_scripts_and_scenarios() -> None:
    assert len(REPORTS) == len(SCRIPTS) == len({report["client"] for report in REPORTS})
    assert {tuple(report["results"]) for report in REPORTS} == {SCENARIOS}


def test_a_failure_is_shown_as_such() -> None:
    failed = {**REPORTS[0], "results": {"chat": {"status": "fails", "detail": "x"}}}
    assert table([failed]).splitlines()[-1].endswith("| all but chat (fails) |")


def test_all_packages_are_pinned() -> None:
    lists = sorted((HERE / "python").glob("requirements-*.txt"))
    lines = [line for path in lists for line in path.read_text().splitlines()]
    assert len(lists) == 2
    assert [line for line in lines if "==" not in line] == []
    packages = json.loads((HERE / "node" / "package.json").read_text())["dependencies"]
    assert [name for name, version in packages.items() if not version[0].isdigit()] == []

"""The page of metrics is made from the table."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_that_of_the_table() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "gen_metrics.py"))["render"]()
    assert (ROOT / "docs" / "metrics.md").read_text() == page, "python scripts/gen_metrics.py"

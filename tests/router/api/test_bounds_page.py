"""The page of bounds is the table, and what admission holds to."""

from __future__ import annotations

from pathlib import Path

from libs.common import service_bounds
from libs.common.service_bounds import render_markdown
from services.router.admission.types import AdmissionLimits, Priority
from services.router.options import RouterOptions


def test_the_page_in_docs_is_the_table() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "bounds.md"
    assert page.read_text() == service_bounds.render_markdown(), (
        "python -m libs.common.service_bounds > docs/bounds.md"
    )


def test_the_limits_of_admission_are_those_of_the_table() -> None:
    limits = AdmissionLimits()
    assert limits.max_running == service_bounds.MAX_RUNNING_REQUESTS == RouterOptions("r").max_requests
    assert tuple(limits.max_waiting[priority] for priority in Priority) == service_bounds.MAX_WAITING_REQUESTS
    assert tuple(limits.max_wait_ms[priority] / 1e3 for priority in Priority) == service_bounds.MAX_WAIT_S
    page = render_markdown()
    for words in ("256 / 512 / 1024 / 64 requests", "30 / 60 / 300 / 300 s", "0.1 to 30 s"):
        assert words in page

"""The view of jobs: its pages, filters, one job, its end by a click, and a router without a database."""

from __future__ import annotations

import time

from playwright.sync_api import Page, expect

from tests.router.console.browser.conftest import OpenPage
from tests.support.console.console_server import ConsoleServer
from tests.support.console.fleet_source import FleetSource
from tests.support.console.job_source import JobSource

QUEUED = "job-000000000000f500f50badcafe0000"  # the fifth newest


def rows(page: Page) -> list[str]:
    texts: list[str] = (
        page.get_by_role("region", name="Table of jobs").locator("tbody tr th").all_inner_texts()
    )
    return texts


def test_pages_and_filters_show_every_job_once(fake: ConsoleServer, open_page: OpenPage) -> None:
    page = open_page(fake.url + "#/jobs").page
    seen: list[str] = []
    for number in (1, 2, 3):
        expect(page.get_by_text(f"page {number}", exact=True)).to_be_visible()
        if number > 1:
            expect(page.locator("tbody tr th").first).not_to_have_text(seen[-1])
        if number == 3:
            expect(page.locator("tbody tr")).to_have_count(50)
        seen += rows(page)
        if number < 3:
            page.get_by_role("button", name="Older").click()
    assert len(seen) == len(set(seen)) == 250 and seen == sorted(seen, reverse=True)
    expect(page.get_by_role("button", name="Older")).to_be_disabled()
    page.get_by_text("Running", exact=True).last.click()
    expect(page.locator("tbody tr")).to_have_count(4)
    page.get_by_label("Tenant of jobs").fill("no such tenant")
    expect(page.get_by_text("No job matches the filters.")).to_be_visible()


def test_a_job_is_cancelled_by_a_click_after_a_question(open_page: OpenPage) -> None:
    now_ms = time.time() * 1e3
    with ConsoleServer(FleetSource(now_ms, requests=5), jobs=JobSource(now_ms)) as server:
        watched = open_page(server.url + f"#/jobs/{QUEUED}")
        watched.expected += ["Failed to load resource"]  # the router ends before the page
        page = watched.page
        detail = page.locator(".detail")
        expect(detail).to_contain_text("hooks.example.com: not delivered yet after 2 tries")
        expect(page.locator(".stat", has_text="Queued")).to_contain_text("40")
        detail.get_by_role("button", name="Cancel the job").click()
        dialog = page.get_by_role("dialog", name="Cancel this job?")
        assert watched.violations() == []
        dialog.get_by_role("button", name="Cancel", exact=True).click()
        assert server.posts == []
        detail.get_by_role("button", name="Cancel the job").click()
        dialog.get_by_role("button", name="Cancel the job").click()
        expect(detail.locator("header")).to_contain_text("Cancelled")
        assert server.posts == [f"cancel {QUEUED}"]
        # Pushed: the queue, and so the row of the list.
        expect(page.locator(".stat", has_text="Queued")).to_contain_text("39")
        expect(page.locator("tr.is-open")).to_contain_text("Cancelled")
        expect(detail.get_by_role("button", name="Cancel the job")).to_have_count(0)
        page.keyboard.press("Escape")
        expect(detail).to_have_count(0)


def test_a_router_without_a_database_says_so(open_page: OpenPage) -> None:
    now_ms = time.time() * 1e3
    jobs = JobSource(now_ms, has_database=False)
    with ConsoleServer(FleetSource(now_ms, requests=5), jobs=jobs) as server:
        watched = open_page(server.url + "#/jobs")
        watched.expected += ["Failed to load resource"]
        expect(watched.page.get_by_text("This router keeps no jobs.")).to_be_visible()
        expect(watched.page.get_by_role("region", name="Table of jobs")).to_have_count(0)
        assert watched.violations() == []

"""100 workers, 10,000 sessions, hostile names, keys and a router that ends, from a fake router."""

from __future__ import annotations

import time
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import expect

from tests.router.console.browser.conftest import OpenPage
from tests.support.console.console_server import ConsoleServer
from tests.support.console.fleet_source import HOSTILE, FleetSource

KEY = "operator-key-of-the-test"
NETWORK = "Failed to load resource"  # Chromium's message for each refusal and each lost connection


def test_all_workers_are_shown_and_searched(fake: ConsoleServer, open_page: OpenPage) -> None:
    page = open_page(fake.url).page
    cards = page.locator("article.card:not(.card-router)")
    expect(cards).to_have_count(100)
    page.get_by_label("Search workers").fill("node-007")
    expect(cards).to_have_count(3)
    page.get_by_label("Search workers").fill("")
    page.locator("label").filter(has_text="Unavailable").click()
    expect(cards).to_have_count(4)
    page.get_by_role("button", name="Prefill", exact=True).click()
    expect(page.get_by_label("prefill-5", exact=True)).to_be_hidden()


def test_of_2000_requests_only_those_in_sight_are_in_the_page(
    fake: ConsoleServer, open_page: OpenPage
) -> None:
    page = open_page(fake.url + "#/requests").page
    grid = page.get_by_role("grid")
    expect(grid).to_have_attribute("aria-rowcount", "2001")
    assert 10 < page.locator(".grid-body [role=row]").count() < 60
    page.locator("label").filter(has_text="Failed").click()
    expect(page.locator(".grid-body .pill-ok")).to_have_count(0)
    expect(page.locator(".grid-body .pill-bad").first).to_be_visible()
    page.get_by_label("Search requests").fill("no such request")
    expect(page.get_by_text("No request matches the filters.")).to_be_visible()
    page.get_by_role("button", name="Show all").click()
    expect(grid).to_have_attribute("aria-rowcount", "2001")


def test_rows_stay_in_place_while_requests_arrive(fake: ConsoleServer, open_page: OpenPage) -> None:
    page = open_page(fake.url + "#/requests").page
    newest = page.locator(".grid-body [aria-rowindex='2']")
    expect(newest).to_be_attached()
    first_seen = newest.inner_text()
    expect(newest).not_to_have_text(first_seen)  # at the top, new rows are shown
    page.get_by_role("grid").evaluate("grid => { grid.scrollTop = 3600 }")
    in_sight = page.locator(".grid-body [aria-rowindex='106']")
    expect(in_sight).to_be_attached()
    row_id = in_sight.get_attribute("id")
    place = page.locator(f"#{row_id}").bounding_box()
    total = fake.source.requests
    while fake.source.requests < total + 3:
        page.wait_for_timeout(100)
    page.wait_for_timeout(500)  # the page has drawn them
    assert page.locator(f"#{row_id}").get_attribute("aria-rowindex") != "106"
    assert page.locator(f"#{row_id}").bounding_box() == place


def test_sessions_are_paged(fake: ConsoleServer, open_page: OpenPage) -> None:
    page = open_page(fake.url + "#/cache").page
    rows = page.get_by_role("region", name="Table of sessions").locator("tbody tr")
    expect(page.get_by_text("1 to 100 of 10,000")).to_be_visible()
    expect(rows).to_have_count(100)
    page.get_by_role("button", name="Next").click()
    expect(page.get_by_text("101 to 200 of 10,000")).to_be_visible()
    expect(rows.first).to_contain_text("chat-00100")
    page.get_by_role("button", name="Previous").click()
    expect(rows.first).to_contain_text("chat-00000")


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_text(fake: ConsoleServer, open_page: OpenPage, name: str) -> None:
    row = next(
        row for row in fake.source.page_of_requests(limit=2000, before=None)["requests"] if row["id"] == name
    )
    page = open_page(f"{fake.url}#/requests/{quote(name, safe='')}/{row['seq']}").page
    expect(page.get_by_role("heading", level=2)).to_have_text(name)
    expect(page.get_by_role("heading", name="Timeline")).to_be_visible()
    page.get_by_role("link", name=name, exact=True).click()  # the session: now a filter
    expect(page.get_by_text(f"Session {name}")).to_be_visible()
    page.goto(f"{fake.url}#/why/{quote(name, safe='')}/{row['seq']}")
    expect(page.locator("tr.is-chosen").first).to_be_visible()
    assert "owned" not in page.title()
    assert page.locator("#app script, #app img:not([alt='']), #app svg[onload]").count() == 0


def test_a_worker_is_drained_and_undrained_by_clicks(fake: ConsoleServer, open_page: OpenPage) -> None:
    page = open_page(fake.url).page
    page.get_by_role("button", name="Drain decode-7", exact=True).click()
    dialog = page.get_by_role("dialog", name="Drain decode-7?")
    dialog.get_by_role("button", name="Cancel").click()
    assert fake.posts == []
    page.get_by_role("button", name="Drain decode-7", exact=True).click()
    dialog.get_by_role("button", name="Drain", exact=True).click()
    undrain = page.get_by_role("button", name="Undrain decode-7", exact=True)
    expect(undrain).to_be_focused()
    expect(page.get_by_label("decode-7", exact=True)).to_contain_text("Draining")
    undrain.click()
    page.get_by_role("dialog").get_by_role("button", name="Undrain", exact=True).click()
    expect(page.get_by_label("decode-7", exact=True)).to_contain_text("Ready")
    assert fake.posts == ["drain decode-7", "undrain decode-7"]


def test_the_key_is_asked_for_and_stays_in_the_tab(open_page: OpenPage) -> None:
    with ConsoleServer(FleetSource(time.time() * 1e3, requests=50), key=KEY) as server:
        watched = open_page(server.url)
        watched.expected.append(NETWORK)
        page = watched.page
        dialog = page.get_by_role("dialog", name="Operator's key")
        dialog.get_by_role("button", name="Not now").click()
        page.get_by_role("button", name="Enter a key").click()
        dialog.get_by_label("Key", exact=True).fill("wrong")
        assert watched.violations() == []
        dialog.get_by_role("button", name="Use key").click()
        expect(dialog).to_contain_text("The key was refused")
        dialog.get_by_label("Key", exact=True).fill(KEY)
        dialog.get_by_role("button", name="Use key").click()
        expect(page.get_by_label("prefill-0", exact=True)).to_be_visible()
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        assert KEY not in page.url
        assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie")
        assert KEY not in page.content()


def test_a_page_reconnects_to_a_router_that_comes_back(open_page: OpenPage) -> None:
    source = FleetSource(time.time() * 1e3, requests=50)
    with ConsoleServer(source) as server:
        port = urlsplit(server.url).port
        assert port is not None
        watched = open_page(server.url + "#/requests")
        watched.expected += [NETWORK, "ERR_"]
        page = watched.page
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        expect(page.locator(".grid-body [role=row]").first).to_be_visible()
    expect(page.get_by_text("Disconnected")).to_be_visible()
    expect(page.get_by_role("button", name="Try now")).to_be_visible()
    assert watched.violations() == []
    expect(page.locator(".grid-body [role=row]").first).to_be_visible()  # what was there stays
    missed = source.start_request()["id"]
    with ConsoleServer(source, port=port):
        expect(page.get_by_text("Live", exact=True)).to_be_visible()
        page.get_by_label("Search requests").fill(missed)
        expect(page.locator(".grid-body [role=row]")).to_have_count(1)

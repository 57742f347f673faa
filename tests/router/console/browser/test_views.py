"""Each view on a large fleet: it opens, it is accessible, and keys move through it."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.router.console.browser.conftest import OpenPage
from tests.support.console.console_server import ConsoleServer

A_REQUEST = "req-000007be"
# A view and something that it shows when all its data is there.
VIEWS = {
    "fleet": ("#/fleet", "text=prefill-35"),
    "requests": ("#/requests", "[role=grid] [role=row][aria-rowindex='2']"),
    "request": (f"#/requests/{A_REQUEST}", "text=Until first token"),
    "why": (f"#/why/{A_REQUEST}", "tr.is-chosen"),
    "cache": ("#/cache", "text=chat-00000"),
    "jobs": ("#/jobs", "text=oldest"),
    "job": ("#/jobs/job-000000000000d000d00badcafe0000", "text=Stored"),
    "playground": ("#/playground", "text=Send a message."),
}
CONTENT = "#main"


def shown(page: Page, selector: str) -> None:
    expect(page.locator(selector).first).to_be_attached()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_opens_without_an_error_and_axe_finds_nothing(
    fake: ConsoleServer, open_page: OpenPage, view: str, theme: str
) -> None:
    fragment, content = VIEWS[view]
    watched = open_page(fake.url + fragment, theme=theme)
    shown(watched.page, content)
    assert watched.violations() == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_fits_700_pixels(fake: ConsoleServer, open_page: OpenPage, view: str) -> None:
    fragment, content = VIEWS[view]
    page = open_page(fake.url + fragment, width=700).page
    shown(page, content)
    for element in ("document.documentElement", "document.querySelector('main')"):
        assert page.evaluate(f"{element}.scrollWidth - {element}.clientWidth") <= 0, element
    assert page.evaluate("document.querySelector('header.top').getBoundingClientRect().right") <= 700


def test_a_violation_of_the_policy_is_a_problem_of_the_page(fake: ConsoleServer, open_page: OpenPage) -> None:
    watched = open_page(fake.url)
    watched.page.evaluate("""() => {
        const script = document.createElement('script');
        script.textContent = "document.title = 'owned'";
        document.body.append(script);
    }""")
    watched.page.wait_for_timeout(0)
    assert any("Content Security Policy" in problem for problem in watched.problems)
    assert watched.page.title() != "owned"
    watched.expected.append("Content Security Policy")


def test_axe_finds_what_is_wrong(fake: ConsoleServer, open_page: OpenPage) -> None:
    watched = open_page(fake.url)
    shown(watched.page, "text=prefill-35")
    watched.page.evaluate("document.querySelector('#main').append(document.createElement('button'))")
    assert any(found.startswith("button-name") for found in watched.violations())


def test_keys_open_views_and_dialogs(fake: ConsoleServer, open_page: OpenPage) -> None:
    watched = open_page(fake.url)
    page = watched.page
    shown(page, "text=prefill-35")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator(CONTENT)).to_be_focused()
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    expect(dialog).to_be_visible()
    assert watched.violations() == []
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.keyboard.press("t")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    for key, title in (
        ("w", "Why here"),
        ("c", "Cache"),
        ("j", "Jobs"),
        ("p", "Playground"),
        ("r", "Requests"),
    ):
        page.keyboard.press("g")
        page.keyboard.press(key)
        expect(page).to_have_title(re.compile(title))
        expect(page.get_by_role("link", name=title, exact=True)).to_have_attribute("aria-current", "page")
    page.keyboard.press("/")
    expect(page.get_by_label("Search requests")).to_be_focused()
    page.keyboard.type("?tg r")  # in a field these are letters
    expect(page.get_by_label("Search requests")).to_have_value("?tg r")


def test_keys_of_one_letter_can_be_turned_off(fake: ConsoleServer, open_page: OpenPage) -> None:
    page = open_page(fake.url).page
    page.keyboard.press("?")
    page.get_by_label("Keys of one letter are on").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    page.keyboard.press("?")
    assert page.locator("html").get_attribute("data-theme") is None
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_keys_move_through_the_requests(fake: ConsoleServer, open_page: OpenPage) -> None:
    page = open_page(fake.url + "#/requests").page
    grid = page.get_by_role("grid")
    shown(page, VIEWS["requests"][1])
    page.keyboard.press("l")  # pause, so that rows stay where they are
    grid.focus()
    selected = grid.locator("[aria-selected=true]")
    page.keyboard.press("ArrowDown")
    expect(selected).to_have_attribute("aria-rowindex", "2")
    page.keyboard.press("ArrowDown")
    expect(selected).to_have_attribute("aria-rowindex", "3")
    page.keyboard.press("PageDown")
    page.keyboard.press("End")
    expect(selected).to_have_attribute("aria-rowindex", "2001")
    expect(selected).to_be_in_viewport()
    assert grid.get_attribute("aria-activedescendant") == selected.get_attribute("id")
    page.keyboard.press("Home")
    expect(selected).to_have_attribute("aria-rowindex", "2")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Timeline")).to_be_visible()
    opened = page.url
    page.keyboard.press("ArrowDown")
    expect(selected).to_have_attribute("aria-rowindex", "3")
    assert page.url != opened
    page.keyboard.press("Escape")
    expect(page.get_by_role("heading", name="Timeline")).to_have_count(0)
    expect(grid).to_be_focused()

"""Writes the images of docs/console.md, when asked with --screenshots."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from tests.router.console.browser.conftest import OpenPage
from tests.support.console.console_server import ConsoleServer
from tests.support.console.small_png import with_palette

IMAGES = Path(__file__).resolve().parents[4] / "docs" / "images"
MAX_BYTES = 150_000
SHOWN_REQUEST = "req-000007a9"  # it moved once


@pytest.fixture
def save(request: pytest.FixtureRequest) -> Path:
    if not request.config.getoption("--screenshots", default=False):
        pytest.skip("--screenshots writes the images of docs/console.md")
    IMAGES.mkdir(exist_ok=True)
    return IMAGES


def shoot(page: Page, path: Path) -> None:
    path.write_bytes(with_palette(page.screenshot(animations="disabled")))
    assert path.stat().st_size <= MAX_BYTES


def test_images_of_four_views(fake: ConsoleServer, open_page: OpenPage, save: Path) -> None:
    page = open_page(fake.url).page
    expect(page.get_by_label("prefill-35", exact=True)).to_be_attached()
    page.wait_for_timeout(1000)  # the charts are drawn
    shoot(page, save / "console-fleet.png")
    page.goto(f"{fake.url}#/requests/{SHOWN_REQUEST}")
    expect(page.get_by_text("Tokens over time")).to_be_visible()
    shoot(page, save / "console-request.png")
    page.goto(f"{fake.url}#/why/{SHOWN_REQUEST}")
    expect(page.locator("tr.is-chosen").first).to_be_visible()
    shoot(page, save / "console-why.png")
    page.goto(f"{fake.url}#/jobs/job-000000000000d000d00badcafe0000")
    expect(page.locator(".detail")).to_contain_text("Stored")
    shoot(page, save / "console-jobs.png")


def test_image_of_the_cache(fake: ConsoleServer, open_page: OpenPage, save: Path) -> None:
    page = open_page(fake.url + "#/cache").page
    page.set_viewport_size({"width": 1440, "height": 790})  # above a session whose name tries to be a script
    expect(page.get_by_text("chat-00000").first).to_be_visible()
    shoot(page, save / "console-cache.png")


def test_image_of_the_playground(fake: ConsoleServer, open_page: OpenPage, save: Path) -> None:
    page = open_page(fake.url + "#/playground", theme="dark").page
    page.get_by_label("System prompt").fill("You answer the customers of Blue Harbor.")
    page.get_by_role("button", name="Use the example tool").click()
    page.get_by_label("Message", exact=True).fill("Where is my order 4711?")
    page.keyboard.press("Enter")
    page.get_by_label("Result", exact=True).fill('{"status": "shipped", "eta": "Thursday"}')
    page.get_by_role("button", name="Send the result").click()
    expect(page.get_by_text("Is there anything else")).to_be_visible()
    expect(page.get_by_role("article", name="Answer").nth(1)).to_have_attribute("aria-busy", "false")
    shoot(page, save / "console-playground.png")

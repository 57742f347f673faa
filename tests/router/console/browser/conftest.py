"""Chromium, pages that are watched for errors, and a fake router with a large fleet."""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.router.console.browser.watched_page import PATIENCE_MS, WatchedPage
from tests.support.console.console_server import ConsoleServer
from tests.support.console.fleet_source import FleetSource

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# Without playwright the files do not import; `make test-console` says so.
collect_ignore_glob = [] if importlib.util.find_spec("playwright") else ["test_*.py"]
_NAMES = ("chromium", "chromium-browser", "google-chrome")
OpenPage = Callable[..., WatchedPage]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", action="store_true", help="write the images of docs/console.md again")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent) + os.sep
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=PATIENCE_MS)

    path = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"Chromium is not installed: none of {', '.join(_NAMES)} is in PATH")
    # Chromium's sandbox refuses to run as root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[OpenPage]:
    """Open an address; the test fails at its end if a page had an error or violated its policy."""
    opened: list[WatchedPage] = []

    def open_one(url: str, *, theme: str = "light", width: int = 1440) -> WatchedPage:
        opened.append(WatchedPage(chromium, url, theme=theme, width=width))
        return opened[-1]

    yield open_one
    problems = [problem for watched in opened for problem in watched.close()]
    assert problems == []


@pytest.fixture(scope="module")
def fake() -> Iterator[ConsoleServer]:
    """A fake router with 100 workers, 10,000 sessions and 2,000 requests."""
    with ConsoleServer(FleetSource(time.time() * 1e3)) as server:
        yield server

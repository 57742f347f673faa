"""The option of pytest, and the loop that replaces its own."""

from __future__ import annotations

import pytest

from tests.support.forked_tests.parent import ForkedRun


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes",
        type=int,
        default=0,
        metavar="N",
        help="collect all tests in one process, and run their files in N forks of it",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the items in forks, unless pytest's own loop has to."""
    option = session.config.option
    if option.processes < 1 or option.collectonly or option.usepdb or session.testsfailed:
        return None
    ForkedRun(session, option.processes).run()
    return True

"""Commands that need a separate process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.processes.command_forks import CommandForks


@pytest.fixture(scope="session")
def commands() -> Iterator[CommandForks]:
    forks = CommandForks()
    yield forks
    forks.close()

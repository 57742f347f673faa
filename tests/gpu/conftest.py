"""Tests that need a CUDA device (`make test-gpu`).

Without a device none of them runs, and the last line of the output reports it.
"""

from __future__ import annotations

import pytest
import torch


def missing_device() -> str:
    """Return the reason why no test can run, or an empty text if there is a device."""
    if torch.cuda.is_available():
        return ""
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return f"no CUDA device here (torch {torch.__version__}, {built})"


@pytest.fixture(scope="session")
def cuda() -> str:
    """The name of a CUDA device."""
    if why := missing_device():
        pytest.skip(why)
    return "cuda:0"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if (why := missing_device()) and terminalreporter.stats.get("skipped"):
        terminalreporter.write_line(f"NOTHING WAS TESTED ON A GPU: {why}", red=True, bold=True)

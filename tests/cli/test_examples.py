"""The examples of the SDK say in one line why they cannot run. Elsewhere they run on a cluster."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples" / "python").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_wrong_address_is_named_in_one_line(example: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(example), "no-port"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"{example}: endpoint: must be HOST:PORT, not 'no-port'\n"

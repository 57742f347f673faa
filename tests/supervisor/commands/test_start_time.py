"""What a command of the local cluster loads before its work: a start takes as long as its imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Each takes a tenth of a second of computing, and none is needed to read a record or to send a signal.
_SLOW = {"asyncio", "google.protobuf", "grpc", "msgspec", "numpy", "rich", "torch"}


@pytest.mark.parametrize("command", ["drain kvstore-0", "restart kvstore-0", "down", "kill kvstore-0"])
def test_a_command_that_sends_signals_loads_nothing_slow(command: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-X", "importtime", "-m", "slipstream"),
            *(*command.split(), "--run-dir", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert f"no cluster runs in {tmp_path}" in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    loaded = {line.rpartition("|")[2].strip() for line in lines}
    assert "slipstream.cluster_record" in loaded
    assert loaded & _SLOW == set()

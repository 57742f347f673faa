"""The directory of a local cluster."""

from __future__ import annotations

import stat
from pathlib import Path

from supervisor.run_directory import RunDirLock


def test_a_new_run_directory_is_open_to_its_owner_only(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    RunDirLock(run_dir).close()
    assert stat.S_IMODE(run_dir.stat().st_mode) == 0o700

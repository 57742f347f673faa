"""The run directory as the supervisor keeps it: its lock and `cluster.json`.

.run/lock            held (flock) by the supervisor for as long as it lives; the kernel lets go of it
.run/cluster.json    addresses and pids, replaced atomically whenever something changes
.run/scrape.json     the admin ports as targets of Prometheus (file_sd), replaced with it
.run/drained/NAME    see drain_marks.py
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import IO

from libs.common.cluster.worker_record import Worker
from slipstream.cluster_record import LOCK_FILE, RECORD_FILE, ClusterRecord
from slipstream.errors import FailedPrecondition
from supervisor.scrape_targets import scrape_targets

SCRAPE_FILE = "scrape.json"


class RunDirLock:
    """Exclusive use of a run directory until closed, or until this process ends in any way."""

    def __init__(self, run_dir: Path) -> None:
        """Raises `FailedPrecondition` when another supervisor has it, or nothing can be written there."""
        self._run_dir, self._is_made_here = run_dir, not run_dir.exists()
        try:
            run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # logs and KV are there
            self._file: IO[str] = (run_dir / LOCK_FILE).open("w")
        except OSError as error:
            raise FailedPrecondition(f"{run_dir} cannot be the run directory: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise FailedPrecondition(
                f"a cluster already runs in {run_dir}: see `slipstream status --run-dir {run_dir}`, "
                f"end it with `slipstream down --run-dir {run_dir}`"
            ) from None

    def close(self) -> None:
        """Release the directory. One that was made for this lock goes with it where nothing else is there."""
        with contextlib.suppress(OSError):
            if self._is_made_here and [path.name for path in self._run_dir.iterdir()] == [LOCK_FILE]:
                (self._run_dir / LOCK_FILE).unlink()
                self._run_dir.rmdir()
        self._file.close()


def write_record(run_dir: Path, record: ClusterRecord, routers: Iterable[Worker] = ()) -> None:
    """Replace `cluster.json` and `scrape.json`; readers see the old or the new one, whole.

    `routers`: the router processes in discovery.
    """
    _replace(run_dir / RECORD_FILE, asdict(record))
    _replace(run_dir / SCRAPE_FILE, scrape_targets(record, routers))


def remove_record(run_dir: Path) -> None:
    """Delete `cluster.json` and `scrape.json`, if they are there."""
    for name in (RECORD_FILE, SCRAPE_FILE):
        (run_dir / name).unlink(missing_ok=True)


def _replace(file: Path, content: object) -> None:
    temporary = file.with_name(f"{file.name}.new")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(file)

"""`slipstream down` and `slipstream kill`: signals to processes that are still the recorded ones."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from slipstream.cluster_record import is_running, read_record
from slipstream.errors import DeadlineExceeded, NotFound
from supervisor.process_stats import is_same_process


def stop_cluster(run_dir: Path, *, timeout_s: float) -> None:
    """SIGTERM to the supervisor; returns when it has stopped everything and released the directory."""
    record = read_record(run_dir)
    if not is_same_process(record.supervisor_pid, record.supervisor_start_ticks):
        raise NotFound(f"the supervisor that is recorded in {run_dir} is gone")
    os.kill(record.supervisor_pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while is_running(run_dir):
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the cluster has not stopped after {timeout_s:g} s")
        time.sleep(0.05)


def kill_process(run_dir: Path, name: str) -> None:
    """SIGKILL to one process. `NotFound` for an unknown name, or one that is down at the moment."""
    process = read_record(run_dir).find(name)
    if process.pid is None or not is_same_process(process.pid, process.start_ticks):
        raise NotFound(f"{process.instance} is not running at the moment ({process.state})")
    os.kill(process.pid, signal.SIGKILL)
    print(f"killed {process.instance} (pid {process.pid})")

"""The run directory: its lock, and `cluster.json`, which tells others what runs.

.run/lock            held (flock) by the supervisor for as long as it lives; the kernel lets go of it
.run/cluster.json    addresses and pids, replaced atomically whenever something changes
.run/drained/NAME    the process NAME is to stay away once it has ended (`slipstream drain`)
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from libs.common.cluster.worker_record import Role
from slipstream.errors import FailedPrecondition, NotFound

_STATE = "cluster.json"
_LOCK = "lock"
_DRAINED = "drained"
# Of our own processes, which all have a WorkerService; etcd and the masters of the pool are others'.
OWN_ROLES = frozenset(role.value for role in Role)


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process. `pid` is None while it is down; `start_ticks` tells a pid from a later use of it.

    `exit_code` is that of its last end, the negative signal where one ended it; None before the first.
    """

    instance: str
    role: str
    state: str
    pid: int | None
    start_ticks: int | None
    endpoint: str
    http: str | None
    restarts: int
    log: str
    exit_code: int | None = None


@dataclass(frozen=True, slots=True)
class ClusterRecord:
    """The cluster of a run directory. `ready_s` is None until everything was ready once."""

    supervisor_pid: int
    supervisor_start_ticks: int | None
    started_at: str  # ISO 8601, UTC
    run_dir: str
    etcd: str
    router_grpc: str
    router_http: str
    model: str
    ready_s: float | None
    processes: tuple[ProcessRecord, ...] = field(default_factory=tuple)

    def find(self, instance: str) -> ProcessRecord:
        """The process of that name. `NotFound`, listing the names, if there is none."""
        for process in self.processes:
            if process.instance == instance:
                return process
        names = ", ".join(process.instance for process in self.processes)
        raise NotFound(f"no process {instance!r}; there are {names}")

    def service_endpoints(self) -> dict[str, str]:
        """Where to find the WorkerService of each of our own processes, by instance."""
        return {process.instance: process.endpoint for process in self.processes if process.role in OWN_ROLES}


class RunDirLock:
    """Exclusive use of a run directory until closed, or until this process ends in any way."""

    def __init__(self, run_dir: Path) -> None:
        """Raises `FailedPrecondition` when another supervisor has it, or nothing can be written there."""
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file: IO[str] = (run_dir / _LOCK).open("w")
        except OSError as error:
            raise FailedPrecondition(f"{run_dir} cannot be the run directory: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise FailedPrecondition(
                f"a cluster already runs in {run_dir}: see `slipstream status`, end it with `slipstream down`"
            ) from None

    def close(self) -> None:
        """Let go of the directory."""
        self._file.close()


def is_running(run_dir: Path) -> bool:
    """Whether a supervisor holds the directory."""
    try:
        with (run_dir / _LOCK).open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except OSError:
        return True


def write_record(run_dir: Path, record: ClusterRecord) -> None:
    """Replace `cluster.json`; readers see the old or the new one, whole."""
    temporary = run_dir / f"{_STATE}.new"
    temporary.write_text(json.dumps(asdict(record), indent=2) + "\n")
    temporary.replace(run_dir / _STATE)


def remove_record(run_dir: Path) -> None:
    """Delete `cluster.json`, if there is one."""
    (run_dir / _STATE).unlink(missing_ok=True)


def is_drained(run_dir: Path, instance: str) -> bool:
    """Whether the process is to stay away."""
    return (run_dir / _DRAINED / instance).exists()


def set_drained(run_dir: Path, instance: str, drained: bool) -> None:
    """Tell the supervisor to keep the process away once it has ended, or not to. Raises
    `FailedPrecondition` where that cannot be written."""
    mark = run_dir / _DRAINED / instance
    try:
        if drained:
            mark.parent.mkdir(exist_ok=True)
            mark.touch()
        else:
            mark.unlink(missing_ok=True)
    except OSError as error:
        raise FailedPrecondition(f"{mark} cannot be written: {error.strerror}") from None


def forget_drained(run_dir: Path) -> None:
    """A new cluster begins with all its processes."""
    for mark in (run_dir / _DRAINED).glob("*"):
        mark.unlink(missing_ok=True)


def read_record(run_dir: Path) -> ClusterRecord:
    """The cluster that runs in `run_dir`. `NotFound` if none does, also if one was killed there."""
    try:
        record = json.loads((run_dir / _STATE).read_text())
    except FileNotFoundError:
        record = None
    except OSError as error:
        raise NotFound(f"{run_dir} cannot be a run directory: {error.strerror}") from None
    if record is None or not is_running(run_dir):
        raise NotFound(f"no cluster runs in {run_dir}; start one with `slipstream up`")
    processes = tuple(ProcessRecord(**process) for process in record.pop("processes"))
    return ClusterRecord(**record, processes=processes)


def start_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot (Linux); None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may hold spaces and parentheses itself.
    return int(stat.rpartition(b")")[2].split()[19])


def is_same_process(pid: int, ticks: int | None) -> bool:
    """Whether `pid` still is the process that was recorded."""
    return ticks is not None and start_ticks(pid) == ticks


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, shared pages included; 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def children(pid: int) -> list[int]:
    """Pids of a process's children; none if it is gone."""
    found: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in listed.read_text().split()]
        except OSError:  # that thread has ended
            continue
    return found

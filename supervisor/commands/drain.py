"""`slipstream drain`, `undrain` and `restart`: processes leave in order, by SIGTERM, and come back.

A process that gets SIGTERM drains: it leaves discovery, takes nothing new, hands over what it runs, and
ends with exit code 0. The supervisor starts it again unless it is marked as drained.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.fleet.restart_waves import restart_waves, skipped_line
from slipstream.cli.run_async import run_async
from slipstream.cluster_record import ProcessRecord, read_record
from slipstream.credentials.user_name import user_name
from slipstream.errors import DeadlineExceeded, FailedPrecondition, Internal, NotFound, SlipstreamError
from supervisor.drain_marks import drained_by, set_drained
from supervisor.process_state import ProcessState, how_ended
from supervisor.process_stats import is_same_process

if TYPE_CHECKING:
    from slipstream.rpc.dial import Dial

_POLL_S = 0.05


def drain_process(run_dir: Path, name: str, *, timeout_s: float) -> None:
    """Returns when the process has ended in order. `NotFound` for an unknown name, `DeadlineExceeded` when
    late, `Internal` when it ended in any other way."""
    process = _service(run_dir, name)
    instance = process.instance
    if process.state == ProcessState.DRAINED:
        print(f"{instance} is drained already")
        return
    began_s = time.monotonic()
    _check_runs(process)  # a mark that stays would keep a process from its start after the drain
    set_drained(run_dir, instance, by=user_name())
    _terminate(process)
    ended = _wait(
        run_dir, instance, lambda now: now.state == ProcessState.DRAINED, timeout_s, "has not ended"
    )
    if ended.exit_code:
        raise Internal(f"{instance} did not drain: it {how_ended(ended.exit_code)}; see {ended.log}")
    print(f"drained {instance} in {time.monotonic() - began_s:.1f} s", flush=True)


def undrain_process(run_dir: Path, name: str, *, timeout_s: float, dial: Dial) -> None:
    """Start a process that was drained and ended; let one that drains and runs on take work again.

    One that ends by a local drain starts again after its end. Raises NotFound, FailedPrecondition for one
    that starts, DeadlineExceeded, and what the process answers.
    """
    process = _service(run_dir, name)
    if process.state == ProcessState.DRAINED:
        _restart(run_dir, [process.instance], timeout_s=timeout_s)
        return
    if drained_by(run_dir, process.instance):  # it has SIGTERM, which nothing takes back
        set_drained(run_dir, process.instance, by="")
        _wait(run_dir, process.instance, _is_back(process), timeout_s, "ends, and is not back")
        print(f"{process.instance} takes work", flush=True)
        return
    _check_runs(process)
    if process.state != ProcessState.READY:  # nothing listens yet
        raise FailedPrecondition(f"{process.instance} is {process.state}: once it is ready it takes work")
    from slipstream.cli.fleet.drains import undrain_at  # with gRPC, which the signals here do not need

    run_async(undrain_at(process.admin or process.endpoint, dial, timeout_s=timeout_s))
    print(f"{process.instance} takes work", flush=True)


def restart_process(run_dir: Path, name: str, *, timeout_s: float) -> None:
    """Restart one process, also one that is drained; returns when it is ready again."""
    _restart(run_dir, [name], timeout_s=timeout_s)


def restart_all(run_dir: Path, *, timeout_s: float, dial: Dial) -> None:
    """Restart one process of each tier at a time, ready again before the next ones leave.

    A process that an operator has drained stays as it is.
    """
    processes = read_record(run_dir).processes
    for wave in restart_waves((each.role, each.instance) for each in processes if each.has_worker_service):
        drained = [name for name in wave if _is_drained(run_dir, name, dial)]
        for name in drained:
            print(skipped_line(name), flush=True)
        _restart(run_dir, [name for name in wave if name not in drained], timeout_s=timeout_s)


def _is_drained(run_dir: Path, name: str, dial: Dial) -> bool:
    """Whether the process is drained, or drains: by its mark, or over gRPC, of which only it knows."""
    if drained_by(run_dir, name):
        return True
    process = read_record(run_dir).find(name)
    if process.state != ProcessState.READY:
        return False
    from slipstream.cli.status import ask_status

    answer = run_async(ask_status(process.admin or process.endpoint, dial))
    return not isinstance(answer, SlipstreamError) and answer.draining


def _restart(run_dir: Path, names: Sequence[str], *, timeout_s: float) -> None:
    """Restart these together; returns when all are ready again.

    One that backs off after a crash gets no signal: it starts again by itself.
    """
    began_s = time.monotonic()
    processes = [_service(run_dir, name) for name in names]
    for process in processes:
        set_drained(run_dir, process.instance, by="")
        if process.state not in (ProcessState.DRAINED, ProcessState.BACKING_OFF):
            _terminate(process)
    for process in processes:
        _wait(run_dir, process.instance, _is_back(process), timeout_s, "is not back")
        print(f"restarted {process.instance} in {time.monotonic() - began_s:.1f} s", flush=True)


def _is_back(before: ProcessRecord) -> Callable[[ProcessRecord], bool]:
    return lambda now: now.state == ProcessState.READY and now.pid != before.pid


def _service(run_dir: Path, name: str) -> ProcessRecord:
    process = read_record(run_dir).find(name)
    if not process.has_worker_service:
        raise FailedPrecondition(f"{process.instance} keeps the cluster's state and is not drained")
    return process


def _terminate(process: ProcessRecord) -> None:
    os.kill(_check_runs(process), signal.SIGTERM)


def _check_runs(process: ProcessRecord) -> int:
    """The process's pid. Raises `NotFound` when that is gone, or never was."""
    if process.pid is None or not is_same_process(process.pid, process.start_ticks):
        raise NotFound(f"{process.instance} is not running at the moment ({process.state})")
    return process.pid


def _wait(
    run_dir: Path, instance: str, arrived: Callable[[ProcessRecord], bool], timeout_s: float, late: str
) -> ProcessRecord:
    deadline_s = time.monotonic() + timeout_s
    while not arrived(process := read_record(run_dir).find(instance)):
        if time.monotonic() > deadline_s:
            raise DeadlineExceeded(f"{instance} {late} after {timeout_s:g} s")
        time.sleep(_POLL_S)
    return process

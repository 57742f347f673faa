"""What is known of workers' ends decides about a request, and what is not known does not."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster.exit_reports import WorkerExit
from services.router.execution.policies.quarantine import ALONE_STRIKES, STRIKES, Quarantine, Suspect
from slipstream.errors import Quarantined


def clock() -> float:
    return 100.0


@given(st.lists(st.sampled_from(WorkerExit), min_size=1, max_size=2 * ALONE_STRIKES))
def test_an_end_that_etcd_cannot_explain_decides_nothing_by_itself(ends: list[WorkerExit]) -> None:
    """A request alone, without tokens: two known crashes decide, or ALONE_STRIKES of both kinds."""
    quarantine, request, known, unknown = Quarantine(clock), Suspect(b"request"), 0, 0
    for number, ended in enumerate(ends):
        worker = f"w{number}"
        quarantine.begin(request, [worker])
        quarantine.record_exit(worker, ended)
        known += ended in (WorkerExit.CRASHED, WorkerExit.UNREPORTED)
        unknown += ended is WorkerExit.UNKNOWN
        is_due = ended is not WorkerExit.KILLED and (known == STRIKES or known + unknown == ALONE_STRIKES)
        with pytest.raises(Quarantined) if is_due else contextlib.nullcontext():
            quarantine.end(request, crashed=worker)
        if is_due:
            return


@pytest.mark.parametrize("later", [WorkerExit.CRASHED, WorkerExit.KILLED])
def test_a_late_report_replaces_what_was_unknown(later: WorkerExit) -> None:
    quarantine, request = Quarantine(clock), Suspect(b"request")
    for worker in "ab":
        quarantine.begin(request, [worker])
        quarantine.record_exit(worker, WorkerExit.UNKNOWN)
        quarantine.end(request, crashed=worker)
    quarantine.begin(request, ["c"])
    for worker in "ab":
        quarantine.record_exit(worker, later)
    with pytest.raises(Quarantined) if later is WorkerExit.CRASHED else contextlib.nullcontext():
        quarantine.end(request, crashed="c")


@pytest.mark.parametrize("first", [WorkerExit.CRASHED, WorkerExit.UNREPORTED, WorkerExit.KILLED])
@pytest.mark.parametrize("later", [WorkerExit.UNKNOWN, WorkerExit.UNREPORTED])
def test_what_is_known_of_an_end_outlasts_its_report_and_etcd(first: WorkerExit, later: WorkerExit) -> None:
    """A router reads the ends of all workers of the strikes again at each further strike."""
    quarantine, request, other = Quarantine(clock), Suspect(b"request"), Suspect(b"other")
    for worker in "ab":
        quarantine.begin(request, [worker])
        quarantine.begin(other, [worker])  # so that two strikes do not decide
        quarantine.record_exit(worker, first)
        quarantine.end(request, crashed=worker)
        quarantine.end(other)
    quarantine.begin(request, ["c"])
    for worker in "ab":
        quarantine.record_exit(worker, later)
    quarantine.record_exit("c", WorkerExit.UNKNOWN)
    with pytest.raises(Quarantined) if first is not WorkerExit.KILLED else contextlib.nullcontext():
        quarantine.end(request, crashed="c")

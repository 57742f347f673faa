"""Workers that fall silent: a strike only if their processes turn out to have ended."""

from __future__ import annotations

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.cluster.exit_reports import WorkerExit
from services.router.execution.policies.quarantine import PROOF_TOKENS, STRIKES, Quarantine, Suspect
from services.router.workers.connection import shows_end
from slipstream.errors import Quarantined


def silenced(quarantine: Quarantine, suspect: Suspect, *workers: str) -> None:
    """Run attempts that end with the silence of their workers."""
    for worker in workers:
        quarantine.begin(suspect, [worker])
        assert quarantine.fell_silent(suspect, worker)
        quarantine.end(suspect)


def test_two_silent_workers_that_end_decide_about_a_lone_request() -> None:
    quarantine, poison = Quarantine(lambda: 0.0), Suspect(b"poison")
    silenced(quarantine, poison, "a", "b")
    assert poison.strikes == 0
    quarantine.silence_ended("a", crashed=True)
    quarantine.check(b"poison")
    quarantine.silence_ended("b", crashed=True)
    with pytest.raises(Quarantined):
        quarantine.check(b"poison")
    with pytest.raises(Quarantined):
        quarantine.begin(poison, ["c"])
    assert quarantine.unproven == 0


def test_ends_after_silence_that_etcd_cannot_explain_decide_nothing() -> None:
    quarantine, request = Quarantine(lambda: 0.0), Suspect(b"request")
    silenced(quarantine, request, "a", "b")
    for worker in "ab":
        quarantine.record_exit(worker, WorkerExit.UNKNOWN)
        quarantine.silence_ended(worker, crashed=True)
    assert request.strikes == 2 and not request.is_quarantined
    quarantine.check(b"request")


def test_the_end_of_a_silent_worker_counts_for_each_request_once() -> None:
    """Its crash may be a strike already, and equal requests share theirs."""
    quarantine, poison, equal = Quarantine(lambda: 0.0), Suspect(b"poison"), Suspect(b"poison")
    for suspect in (poison, equal):
        quarantine.begin(suspect, ["a"])
    for suspect in (poison, equal):
        quarantine.fell_silent(suspect, "a")
        quarantine.end(suspect)
    silenced(quarantine, poison, "b")
    quarantine.begin(poison, ["c"])
    assert not quarantine.fell_silent(poison, "d"), "it runs elsewhere"
    quarantine.end(poison)
    quarantine.silence_ended("a", crashed=True)
    assert (poison.struck_by, equal.struck_by) == (("a",), ("a",))
    assert poison.silent_workers == ("b",) and not equal.silent_workers
    again = Suspect(b"poison")
    quarantine.restore_strikes(again)
    assert again.strikes == 1
    quarantine.silence_ended("b", crashed=True)
    assert poison.is_quarantined and not poison.silent_workers
    quarantine.clear_strikes(poison)  # an attempt of it ran to its end
    quarantine.check(b"poison")
    assert not poison.is_quarantined


def test_a_crash_at_once_and_one_after_silence_count_together() -> None:
    quarantine, poison = Quarantine(lambda: 0.0), Suspect(b"poison")
    silenced(quarantine, poison, "a")
    quarantine.silence_ended("a", crashed=True)
    quarantine.begin(poison, ["b"])
    with pytest.raises(Quarantined):
        quarantine.end(poison, crashed="b")


@pytest.mark.parametrize("way", ["answers again", "killed", "proven", "ended"])
def test_a_request_is_not_struck(way: str) -> None:
    """The workers stood still or were killed from outside, or the request ran well since."""
    quarantine, request = Quarantine(lambda: 0.0), Suspect(b"request")
    silenced(quarantine, request, "a", "b")
    if way == "proven":
        quarantine.begin(request, ["c"])
        quarantine.observe(request, PROOF_TOKENS)
        quarantine.end(request)
    elif way == "ended":
        quarantine.clear_strikes(request)
    for worker in "ab":
        if way == "killed":
            quarantine.record_exit(worker, WorkerExit.KILLED)
        quarantine.silence_ended(worker, crashed=way != "answers again")
    assert request.strikes == 0 and not request.is_quarantined and not quarantine._silent
    quarantine.check(b"request")


@given(st.integers(2, 6), st.lists(st.booleans(), min_size=1, max_size=6))
def test_no_request_of_a_crowd_is_refused_for_one_silence(n: int, crashes: list[bool]) -> None:
    """Whatever the ends of workers that ran many requests at once: a later crash alone decides."""
    quarantine, crowd = Quarantine(lambda: 0.0), [Suspect(bytes([i])) for i in range(n)]
    for index, crashed in enumerate(crashes):
        worker = f"w{index}"
        if any(suspect.is_quarantined for suspect in crowd):
            raise AssertionError("one of a crowd is quarantined")
        for suspect in crowd:
            quarantine.begin(suspect, [worker])
        for suspect in crowd:
            quarantine.fell_silent(suspect, worker)
            quarantine.end(suspect)
        quarantine.silence_ended(worker, crashed=crashed)
    struck = sum(crashes)
    assert all(suspect.strikes == struck for suspect in crowd)
    assert struck < STRIKES + 1 or not any(suspect.is_quarantined for suspect in crowd)


@pytest.mark.parametrize(
    ("details", "is_end"),
    [
        ("failed to connect to all addresses; last error: connect: Connection refused (111)", True),
        ("recvmsg:Connection reset by peer", True),
        ("Socket closed", True),
        ("ping timeout", False),
        ("Cancelling all calls", False),
        ("", False),
    ],
)
def test_only_a_closed_port_shows_that_a_process_has_ended(details: str, is_end: bool) -> None:
    assert shows_end(grpc.StatusCode.UNAVAILABLE, details) is is_end
    assert not shows_end(grpc.StatusCode.DEADLINE_EXCEEDED, details)

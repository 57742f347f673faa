"""How loaded a worker is: what this router sent there, and what the worker's report says beyond that."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from libs.common.cluster.worker_record import Role, Worker
from services.router.workers import connection as worker_link
from services.router.workers.connection import TokensInFlight, WorkerConnection
from slipstream.v1 import worker_pb2
from tests.router.support.connection_owner import AnyWorker


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Owner(AnyWorker):
    """Counts what it is notified of."""

    def __init__(self) -> None:
        self.n_changes = 0
        self.reports: list[tuple[WorkerConnection, worker_pb2.LoadReport]] = []

    def readiness_changed(self) -> None:
        self.n_changes += 1

    def reported(self, link: WorkerConnection, report: worker_pb2.LoadReport) -> None:
        self.reports.append((link, report))


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=[Role.PREFILL, Role.DECODE])
async def link(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[WorkerConnection]:
    worker = Worker(request.param, "w0", "127.0.0.1:1", "i")
    link = WorkerConnection(worker, AnyWorker(), clock=clock)
    yield link
    await link.close()


def report(sequence: int, *, tokens: int, running: int, waiting: int = 0) -> worker_pb2.LoadReport:
    return worker_pb2.LoadReport(
        sequence=sequence,
        prefill_tokens_in_flight=tokens,
        decode_tokens_in_flight=tokens,
        requests_running=running,
        requests_waiting=waiting,
    )


async def test_of_a_report_counts_what_others_sent(link: WorkerConnection, clock: Clock) -> None:
    mine = TokensInFlight(link, 100)
    assert link.load() == (None, 100, 1)
    link._apply(report(1, tokens=350, running=2, waiting=1))
    assert link.load()[1:] == (350, 3)
    later = TokensInFlight(link, 40)  # not in the report yet
    assert link.load()[1:] == (390, 4)
    mine.release()
    mine.release()
    assert link.load()[1:] == (290, 3)
    link._apply(report(2, tokens=10, running=0))  # from before the second one
    assert link.load()[1:] == (40, 1)
    later.add(5)
    later.lower_to(15)
    assert link.load()[1:] == (15, 1)
    assert link.own_tokens == (15,)


async def test_a_report_makes_a_worker_ready_until_it_drains(clock: Clock) -> None:
    owner = Owner()
    worker = Worker(Role.PREFILL, "w0", "127.0.0.1:1", "i")
    link = WorkerConnection(worker, owner, clock=clock)
    settled: list[tuple[str, bool]] = []
    assert link.load() == (None, 0, 0) and not (link.ready or link.draining or link.has_reported)
    link.when_settled(lambda key, has_ended: settled.append((key, has_ended)))
    sent = worker_pb2.LoadReport(sequence=2, prefill_tokens_in_flight=7, decode_tokens_in_flight=9)
    link._apply(sent)
    assert link.ready and link.has_reported and link.load()[1:] == (7, 0)
    assert (owner.n_changes, owner.reports) == (1, [(link, sent)])
    assert settled == [("prefill/w0/i", False)]
    link._apply(report(2, tokens=100, running=1))  # it was read before
    assert link.load()[1:] == (7, 0)
    link._apply(worker_pb2.LoadReport(sequence=3, draining=True))
    assert link.draining and not link.ready and owner.n_changes == 2
    link._apply(report(1, tokens=100, running=1))  # of the next stream
    assert link.ready and link.load()[1:] == (100, 1)
    clock.now_s += worker_link.SILENCE_S
    assert not link.is_silent and link.check_heartbeat() is False
    await link.close()
    assert not link.ready


async def test_a_stale_report_counts_for_nothing(link: WorkerConnection, clock: Clock) -> None:
    TokensInFlight(link, 100)
    link._apply(report(1, tokens=350, running=2))
    clock.now_s += worker_link.STALE_AFTER_S
    assert link.report is not None
    assert link.load() == (link.report, 350, 2)
    clock.now_s += 0.001
    assert link.report is None
    assert link.load() == (None, 100, 1)


class Noted:
    """A `WorkerListener` that notes its calls, and then raises if it is to."""

    def __init__(self, *, raises: bool = False) -> None:
        self.calls: list[str] = []
        self._raises = raises

    def on_worker_silent(self, link: WorkerConnection) -> None:
        self._note("silent")

    def on_worker_draining(self, link: WorkerConnection) -> None:
        self._note("draining")

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if self._raises:
            raise ZeroDivisionError


async def test_a_listener_that_raises_keeps_no_other_from_a_silent_or_draining_worker(
    link: WorkerConnection, clock: Clock
) -> None:
    listeners = [Noted(raises=number % 2 == 1) for number in range(6)]
    link.listeners.update(listeners)
    link._apply(report(1, tokens=0, running=0))
    link.draining = True
    assert not link.check_heartbeat()
    clock.now_s += worker_link.SILENCE_S + 1
    assert link.check_heartbeat()
    assert [listener.calls for listener in listeners] == [["draining", "silent"]] * 6
    assert not link.ready

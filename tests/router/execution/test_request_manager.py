"""One request's task: a deadline and a preemption at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.router.execution.running_request import RunningRequest, execute
from slipstream import errors


class FakeTicket:
    """An admission ticket that is admitted at first, and never again after a preemption."""

    def __init__(self) -> None:
        self.began = self.preempted = False
        self._admitted = asyncio.Event()
        self._admitted.set()

    async def admitted(self) -> None:
        await self._admitted.wait()

    def put_back(self) -> None:
        self._admitted.clear()
        self.began, self.preempted = False, True


class EndlessWork:
    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("deadline_first", [True, False])
async def test_a_deadline_ends_a_request_that_is_being_preempted(deadline_first: bool) -> None:
    run, place = RunningRequest("r"), FakeTicket()
    work: Any = EndlessWork()
    run.ticket = place  # type: ignore[assignment]
    task = run.start(execute(run, lambda: work))
    await asyncio.sleep(0)

    def preempt() -> None:
        place.put_back()
        run.preempt()

    for step in (run.end_at_deadline, preempt) if deadline_first else (preempt, run.end_at_deadline):
        step()
    async with asyncio.timeout(60):
        await asyncio.wait([task])
    assert task.cancelled()
    assert isinstance(run.ended_by, errors.DeadlineExceeded)

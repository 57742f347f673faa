"""One request's task: what ends it, alone and together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.router.execution.running_request import RunningRequest, execute
from slipstream import errors


class Place:
    """Let in at first; put back by `preempt`, and then never let in again."""

    def __init__(self) -> None:
        self.began = self.preempted = False
        self._admitted = asyncio.Event()
        self._admitted.set()

    async def admitted(self) -> None:
        await self._admitted.wait()

    def put_back(self) -> None:
        self._admitted.clear()
        self.began, self.preempted = False, True


class Work:
    async def run(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize("deadline_first", [True, False])
async def test_a_deadline_that_passes_while_a_request_is_put_back_ends_it(deadline_first: bool) -> None:
    run, place = RunningRequest("r"), Place()
    work: Any = Work()
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

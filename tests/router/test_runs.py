"""One request's task: what ends it, alone and together."""

from __future__ import annotations

import asyncio
from typing import Any

from libs.common import errors
from services.router.runs import Run, _execute


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


async def test_a_deadline_that_passes_while_a_request_is_put_back_ends_it() -> None:
    run, place = Run("r"), Place()
    work: Any = Work()
    run.place = place  # type: ignore[assignment]
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + 0.05
    task = run.start(_execute(run, lambda: work, deadline_s=deadline_s))

    def preempt() -> None:
        place.put_back()
        run.preempt()

    await asyncio.sleep(0)
    loop.call_at(deadline_s, preempt)  # the time-out is set already, and goes first
    async with asyncio.timeout(60):
        assert isinstance(await task, errors.DeadlineExceeded)

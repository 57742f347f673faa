"""The task of a sequence: its end, its clean-up, its lines in the log."""

from __future__ import annotations

import asyncio
import logging

import pytest

from libs.common.telemetry.logs import LogFormatter
from libs.worker.requests.attempts import client_request_id
from libs.worker.requests.sequence_task import SequenceTask
from slipstream.errors import Aborted, Unavailable
from slipstream.logs.lines import LineFormat

WAIT_S = 30.0


@pytest.mark.parametrize(
    ("of_worker", "of_client"),
    [("mine.0123456789ab", "mine"), ("a.b.0123456789ab", "a.b"), ("mine", "mine"), (".0123456789ab",) * 2],
)
def test_the_id_of_the_client_is_found_in_that_of_the_worker(of_worker: str, of_client: str) -> None:
    assert client_request_id(of_worker) == of_client


async def test_lines_of_the_task_name_the_request_of_the_client() -> None:
    lines: list[str] = []

    class Task(SequenceTask):
        async def _run(self) -> None:
            record = logging.LogRecord("x", logging.INFO, __file__, 1, "m", None, None)
            lines.append(LogFormatter(LineFormat("decode", "decode-0")).format(record))

    await Task("decode", request_id="mine.0123456789ab").start()
    assert lines[0].endswith(" decode/decode-0 x: m request_id=mine")


class HeldTask(SequenceTask):
    """Works until its end, then cleans up until `may_release`."""

    def __init__(self) -> None:
        super().__init__("held", request_id="r")
        self.works, self.may_release = asyncio.Event(), asyncio.Event()
        self.released = False

    async def _run(self) -> None:
        try:
            self.works.set()
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            pass
        finally:
            self._cleaning_up = True
            await self.may_release.wait()
            self.released = True


@pytest.mark.parametrize("works", [False, True])
async def test_an_end_lets_the_task_release_what_it_holds(works: bool) -> None:
    """Also an end before the first iteration of the task; ends during the clean-up change nothing."""
    held = HeldTask()
    task = held.start()
    if works:
        await held.works.wait()
    held.end(Unavailable("first"))
    held.end(Aborted("second"))
    async with asyncio.timeout(WAIT_S):
        while not held._cleaning_up:
            await asyncio.sleep(0)
    held.end(Aborted("third"))
    held._cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    held.may_release.set()
    async with asyncio.timeout(WAIT_S):
        await held.wait_ended()
    assert held.released and task.exception() is None
    assert isinstance(held._end_error, Unavailable)


async def test_who_waits_for_the_end_may_leave() -> None:
    held = HeldTask()
    await held.wait_ended()  # nothing has started
    task = held.start()
    await held.works.wait()
    waiting = asyncio.create_task(held.wait_ended())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert not task.done() and not held._cleaning_up
    held.may_release.set()
    held.end()
    async with asyncio.timeout(WAIT_S):
        await task
    assert held._end_error is None


async def test_an_end_of_a_task_that_passed_its_last_stop_or_has_not_started_changes_nothing() -> None:
    held = HeldTask()
    held.end(Aborted("not started"))
    task = held.start()
    await held.works.wait()
    held._ending = True
    held.end(Aborted("too late"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not held._cleaning_up and held._end_error is None
    held.may_release.set()
    task.cancel()
    await task

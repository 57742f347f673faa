"""DeadlineQueue: what is not removed in time is passed on once, by one timer."""

from __future__ import annotations

import asyncio

from libs.common.rpc.deadline_queue import DeadlineQueue
from tests.support.processes.process_checks import eventually


async def test_items_pass_in_order_unless_they_are_removed() -> None:
    passed: list[str] = []
    queue: DeadlineQueue[str] = DeadlineQueue(0.01, passed.append)
    for item in ("a", "b", "c"):
        queue.add(item)
    queue.remove("b")
    queue.remove("unknown")
    await eventually(lambda: len(passed) == 2)
    queue.add("d")  # the first timer has ended
    await eventually(lambda: len(passed) == 3)
    assert passed == ["a", "c", "d"]


async def test_an_item_that_is_added_during_the_pass_waits_its_time() -> None:
    passed: list[str] = []

    def take(item: str) -> None:
        passed.append(item)
        if len(passed) == 1:
            queue.remove("b")
            queue.add("c")

    queue: DeadlineQueue[str] = DeadlineQueue(0.01, take)
    queue.add("a")
    queue.add("b")
    await eventually(lambda: passed == ["a", "c"])


async def test_many_items_have_one_timer() -> None:
    loop = asyncio.get_running_loop()
    timers = len(loop._scheduled)  # type: ignore[attr-defined]
    queue: DeadlineQueue[int] = DeadlineQueue(60.0, lambda item: None)
    for item in range(100):
        queue.add(item)
    assert len(loop._scheduled) == timers + 1  # type: ignore[attr-defined]

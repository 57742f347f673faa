"""Turns of work on the event loop: in order, a few at a time, and a cancelled one holds nobody up."""

from __future__ import annotations

import asyncio

from services.router.execution.policies.start_pacer import StartPacer


async def test_a_burst_goes_on_a_few_a_turn_in_order() -> None:
    turns, began, loop_turns = StartPacer(per_iteration=3), [], 0
    done = asyncio.Event()

    async def work(number: int) -> None:
        await turns.acquire()
        began.append((number, loop_turns))
        if number == 19:
            done.set()

    tasks = [asyncio.create_task(work(number)) for number in range(20)]
    async with asyncio.timeout(60):
        while not done.is_set():
            loop_turns += 1
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert [number for number, _ in began] == list(range(20))
    by_turn = [turn for _, turn in began]
    assert max(by_turn.count(turn) for turn in by_turn) <= 3
    await asyncio.wait_for(turns.acquire(), 60)  # alone again: at once


async def test_a_cancelled_one_holds_nobody_up() -> None:
    turns = StartPacer(per_iteration=1)
    tasks = [asyncio.create_task(turns.acquire()) for _ in range(6)]
    await asyncio.sleep(0)
    for task in tasks[2:4]:
        task.cancel()
    async with asyncio.timeout(60):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [False] * 2 + [True] * 2 + [
        False
    ] * 2

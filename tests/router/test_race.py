"""Who runs a race is given back, whoever wins and whenever the request is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from services.router.attempt import Attempt
from services.router.attempt_types import Batch
from services.router.race import Runner, race


class Slow:
    """An attempt that answers when it may, and whose end takes until it may."""

    def __init__(self) -> None:
        self.may_answer, self.may_end, self.ending = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.closed = False

    async def batches(self) -> AsyncGenerator[Batch, None]:
        try:
            await self.may_answer.wait()
            yield Batch([7])
            yield Batch([8])
        finally:
            self.ending.set()
            await self.may_end.wait()
            self.closed = True


def runner(attempt: Slow) -> Runner:
    return Runner(cast(Attempt, attempt), cast(Any, None))


async def test_the_winner_goes_on_and_the_other_is_dropped() -> None:
    attempts = Slow(), Slow()
    first, hedge = runner(attempts[0]), runner(attempts[1])
    dropped: list[Runner] = []
    for attempt in attempts:
        attempt.may_end.set()
    attempts[1].may_answer.set()
    winner, batches = await race(
        first, wait_s=0.0, second=lambda: hedge, drop=lambda who, why: dropped.append(who)
    )
    assert (winner, [batch.tokens async for batch in batches]) == (hedge, [[7], [8]])
    assert dropped == [first]
    assert all(attempt.closed for attempt in attempts)


async def test_a_cancel_while_the_loser_ends_gives_the_winner_back_too() -> None:
    attempts = Slow(), Slow()
    first, hedge = runner(attempts[0]), runner(attempts[1])
    dropped: list[Runner] = []
    attempts[1].may_answer.set()
    attempts[1].may_end.set()
    task = asyncio.create_task(
        race(first, wait_s=0.0, second=lambda: hedge, drop=lambda who, why: dropped.append(who))
    )
    async with asyncio.timeout(30):
        await attempts[0].ending.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert set(dropped) == {first, hedge}
    assert attempts[1].closed

"""Who runs a race is given back, whoever wins and whenever the request is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from services.router.execution.attempt import Attempt
from services.router.execution.attempt_types import TokenBatch, WorkerFailed
from services.router.execution.hedging import Contender, run_hedged
from slipstream import errors


class Slow:
    """An attempt that answers when it may, and whose end takes until it may."""

    def __init__(self) -> None:
        self.may_answer, self.may_end, self.ending = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.closed = False
        self.fails: WorkerFailed | None = None

    async def batches(self) -> AsyncGenerator[TokenBatch, None]:
        try:
            await self.may_answer.wait()
            if self.fails is not None:
                raise self.fails
            yield TokenBatch([7])
            yield TokenBatch([8])
        finally:
            self.ending.set()
            await self.may_end.wait()
            self.closed = True


def runner(attempt: Slow) -> Contender:
    return Contender(cast(Attempt, attempt), cast(Any, None))


async def test_the_winner_goes_on_and_the_other_is_dropped() -> None:
    attempts = Slow(), Slow()
    first, hedge = runner(attempts[0]), runner(attempts[1])
    dropped: list[Contender] = []
    for attempt in attempts:
        attempt.may_end.set()
    attempts[1].may_answer.set()
    winner, batches = await run_hedged(
        first, wait_s=0.0, second=lambda: hedge, drop=lambda who, why: dropped.append(who)
    )
    assert (winner, [batch.tokens async for batch in batches]) == (hedge, [[7], [8]])
    assert dropped == [first]
    assert all(attempt.closed for attempt in attempts)


async def test_a_cancel_while_the_loser_ends_gives_the_winner_back_too() -> None:
    attempts = Slow(), Slow()
    first, hedge = runner(attempts[0]), runner(attempts[1])
    dropped: list[Contender] = []
    attempts[1].may_answer.set()
    attempts[1].may_end.set()
    task = asyncio.create_task(
        run_hedged(first, wait_s=0.0, second=lambda: hedge, drop=lambda who, why: dropped.append(who))
    )
    async with asyncio.timeout(30):
        await attempts[0].ending.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert set(dropped) == {first, hedge}
    assert attempts[1].closed


@pytest.mark.parametrize(
    ("failing", "then", "gone"),
    [
        ("hedge", "cancelled", "hedge first"),
        ("hedge", "first wins", "hedge"),
        ("hedge", "first fails", "hedge"),
        ("first", "cancelled", "hedge"),  # a first one alone is its caller's
        ("first", "hedge wins", "first"),
        ("first", "hedge fails", "hedge"),
    ],
)
async def test_who_failed_is_dropped_once_whatever_comes_next(failing: str, then: str, gone: str) -> None:
    attempts = {"first": Slow(), "hedge": Slow()}
    runners = {name: runner(attempt) for name, attempt in attempts.items()}
    dropped: list[tuple[Contender, WorkerFailed | None]] = []
    hedged = asyncio.Event()

    def second() -> Contender:
        hedged.set()
        return runners["hedge"]

    def fail(name: str) -> None:
        attempts[name].fails = WorkerFailed(errors.Unavailable(name), name)
        attempts[name].may_answer.set()

    for attempt in attempts.values():
        attempt.may_end.set()
    task = asyncio.create_task(
        run_hedged(
            runners["first"], wait_s=0.0, second=second, drop=lambda who, why: dropped.append((who, why))
        )
    )
    async with asyncio.timeout(30):
        await hedged.wait()
        fail(failing)
        await attempts[failing].ending.wait()
        for _ in range(5):
            await asyncio.sleep(0)
        other = attempts["first" if failing == "hedge" else "hedge"]
        if then == "cancelled":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif then.endswith("wins"):
            other.may_answer.set()
            winner, batches = await task
            await batches.aclose()
            assert winner is runners[then.split()[0]]
        else:
            fail(then.split()[0])
            with pytest.raises(WorkerFailed) as failed:
                await task
            assert failed.value.worker == "first"
    assert dropped == [(runners[name], attempts[name].fails) for name in gone.split()]

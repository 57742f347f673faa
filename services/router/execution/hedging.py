"""Two attempts at one request, of which the first to bring a token goes on: the hedge of a slow prefill."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from services.router.execution.attempt import Attempt
from services.router.execution.attempt_types import TokenBatch, WorkerFailed
from services.router.execution.dispatcher import Assignment
from slipstream.errors import SlipstreamError


@dataclass(slots=True, eq=False)
class Contender:
    """An attempt and where it was placed."""

    attempt: Attempt
    routed: Assignment


_Entry = tuple[Contender, AsyncGenerator[TokenBatch, None]]


async def run_hedged(
    first: Contender,
    *,
    wait_s: float,
    second: Callable[[], Contender | None],
    drop: Callable[[Contender, WorkerFailed | None], None],
) -> _Entry:
    """The winner and its batches, for the caller to close. Raises the first one's error when both fail before
    their first batch, or it alone.

    `second` is asked for when nothing came for `wait_s` and may decline. `drop` is called for a runner that
    lost, with what it failed of, if it did; the winner, and a first runner alone, are the caller's to
    release.
    """
    running: dict[asyncio.Task[TokenBatch | None], _Entry] = {}

    def enter(runner: Contender) -> None:
        batches = runner.attempt.batches()
        running[asyncio.create_task(_next_or_none(batches))] = (runner, batches)

    enter(first)
    won: _Entry | None = None
    first_failed: WorkerFailed | SlipstreamError | None = None
    try:
        done, _ = await asyncio.wait(running, timeout=wait_s)
        if not done and (other := second()) is not None:
            enter(other)
        while running:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                runner, batches = entry = running.pop(task)
                try:
                    opening = task.result()
                except (WorkerFailed, SlipstreamError) as failure:
                    if runner is first:
                        first_failed = failure
                    else:
                        drop(runner, _of_worker(failure))
                    continue
                if first_failed is not None:
                    drop(first, _of_worker(first_failed))
                won = entry
                return runner, _with_first(opening, batches)
        assert first_failed is not None
        raise first_failed
    finally:
        del first_failed  # it knows this frame
        await _give_up(running, won, drop)


async def _give_up(
    running: dict[asyncio.Task[TokenBatch | None], _Entry],
    won: _Entry | None,
    drop: Callable[[Contender, WorkerFailed | None], None],
) -> None:
    """End those that still run. A cancel meanwhile ends all, with who won: its caller gets nothing of it."""
    try:
        for task, (_, batches) in running.items():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await batches.aclose()
    except asyncio.CancelledError:
        for task in running:
            task.cancel()
        if won is not None:
            runner, batches = won
            drop(runner, None)
            await batches.aclose()
        raise
    finally:
        for runner, _ in running.values():
            drop(runner, None)


async def _with_first(
    opening: TokenBatch | None, batches: AsyncGenerator[TokenBatch, None]
) -> AsyncGenerator[TokenBatch, None]:
    async with aclosing(batches):
        if opening is not None:
            yield opening
            async for batch in batches:
                yield batch


async def _next_or_none(batches: AsyncGenerator[TokenBatch, None]) -> TokenBatch | None:
    return await anext(batches, None)


def _of_worker(failure: WorkerFailed | SlipstreamError) -> WorkerFailed | None:
    return failure if isinstance(failure, WorkerFailed) else None

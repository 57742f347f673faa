"""A coroutine with a head start ends as one that is simply awaited."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Coroutine

import pytest

from libs.common.rpc.eager_task import EagerTask


async def work(
    seen: list[str], gate: asyncio.Future[str] | None, *, again: asyncio.Future[str] | None = None
) -> str:
    seen.append("began")
    try:
        said = "nothing" if gate is None else await gate
    except asyncio.CancelledError:
        seen.append("cancelled")
        if again is None:
            raise
        return await again
    if again is not None:
        said += await again
    if said == "bad":
        raise ValueError(said)
    seen.append("ended")
    return said


def future() -> asyncio.Future[str]:
    return asyncio.get_running_loop().create_future()


async def test_it_begins_at_once_and_waits_where_it_is_awaited() -> None:
    seen: list[str] = []
    gate, again = future(), future()
    begun = EagerTask(work(seen, gate, again=again))
    assert seen == ["began"]
    gate.set_result("one, ")
    await asyncio.sleep(0)
    assert seen == ["began"]  # nobody awaits it yet
    asyncio.get_running_loop().call_later(0.001, again.set_result, "two")
    assert await begun == "one, two"


async def test_what_never_waits_is_over_when_it_is_made() -> None:
    seen: list[str] = []
    begun = EagerTask(work(seen, None))
    assert seen == ["began", "ended"]
    assert await begun == "nothing"


async def _fails_at_once() -> None:
    raise KeyError("field")


async def _fails_later() -> None:
    await asyncio.sleep(0)
    raise KeyError("field")


@pytest.mark.parametrize("fails", [_fails_at_once, _fails_later])
async def test_errors_come_to_who_awaits(fails: Callable[[], Coroutine[None, None, None]]) -> None:
    begun: EagerTask[None] = EagerTask(fails())
    with pytest.raises(KeyError, match="field"):
        await begun


async def test_what_is_cancelled_in_its_first_step_cancels_who_awaits_and_not_who_made_it() -> None:
    async def is_over() -> None:
        raise asyncio.CancelledError

    begun: EagerTask[None] = EagerTask(is_over())
    with pytest.raises(asyncio.CancelledError):
        await begun


@pytest.mark.parametrize("waits_again", [False, True])
async def test_a_cancel_reaches_it(waits_again: bool) -> None:
    seen: list[str] = []
    again = future() if waits_again else None
    begun = EagerTask(work(seen, future(), again=again))

    async def wait() -> str:
        return await begun

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    if again is None:
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        asyncio.get_running_loop().call_later(0.001, again.set_result, "after all")
        assert await task == "after all"
    assert seen == ["began", "cancelled"]


class Held:
    """Something that a coroutine holds."""


async def _takes(_: Held) -> None:
    pass


async def _breaks(_: Held) -> None:
    raise ValueError


async def _waits(_: Held) -> None:
    await asyncio.sleep(0)


@pytest.mark.parametrize("coroutine", [_takes, _breaks, _waits])
@pytest.mark.parametrize("awaited", [True, False])
async def test_nothing_of_it_waits_for_the_cycle_collector(
    coroutine: Callable[[Held], Coroutine[None, None, None]], awaited: bool
) -> None:
    gc.disable()
    try:
        held = Held()
        gone, begun = weakref.ref(held), EagerTask(coroutine(held))
        its_own = weakref.ref(begun)
        if awaited:
            with contextlib.suppress(ValueError):
                await begun
        del held, begun
        assert gone() is None and its_own() is None
    finally:
        gc.enable()

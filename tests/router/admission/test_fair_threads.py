"""FairThreads: order between tenants, shares of the queue, and what a cancelled caller leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from services.router.admission.fair_threads import FairThreads
from slipstream.errors import InvalidArgument, Overloaded


class HeldThreads:
    """FairThreads of one thread, which runs a piece that ends when `release` is set."""

    def __init__(self, *, max_waiting: int = 512) -> None:
        self.threads = FairThreads(n_threads=1, max_waiting=max_waiting)
        self.release = threading.Event()
        self.began = threading.Event()
        self.ran: list[str] = []
        self.holder = asyncio.create_task(self.threads.run("holder", self._hold))

    def _hold(self) -> bool:
        self.began.set()
        return self.release.wait(60)

    def piece(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.ran.append(name)
            return name

        return work

    def start(self, tenant: str, name: str, *, admitted: bool = True) -> asyncio.Task[str]:
        return asyncio.create_task(
            self.threads.run_in_time(tenant, self.piece(name), None, admitted=admitted)
        )

    async def until_waiting(self, count: int) -> None:
        async with asyncio.timeout(60):
            while not (self.began.is_set() and self.threads.waiting == count):
                await asyncio.sleep(0.001)


async def test_a_piece_runs_on_another_thread_and_gives_its_result_or_error() -> None:
    threads = FairThreads()
    assert await threads.run("a", threading.get_ident) != threading.get_ident()

    def fail() -> None:
        raise InvalidArgument("messages", "must be given")

    with pytest.raises(InvalidArgument, match="must be given"):
        await threads.run("a", fail)
    threads.close()


async def test_tenants_take_turns_whatever_one_of_them_queues() -> None:
    held = HeldThreads()
    tasks = [held.start("many", f"many {n}") for n in range(4)]
    await held.until_waiting(4)
    tasks += [held.start("few", f"few {n}") for n in range(2)]
    await held.until_waiting(6)
    held.release.set()
    async with asyncio.timeout(60):
        await asyncio.gather(held.holder, *tasks)
    assert held.ran == ["many 0", "few 0", "many 1", "few 1", "many 2", "many 3"]
    held.threads.close()


async def test_a_cancelled_caller_leaves_at_most_the_running_piece() -> None:
    held = HeldThreads()
    waiting = held.start("a", "never")
    await held.until_waiting(1)
    for task in (waiting, held.holder):  # one that waits, and the one that runs
        task.cancel()
    await asyncio.gather(waiting, held.holder, return_exceptions=True)
    assert held.threads.waiting == 0
    after = held.start("a", "after")
    await held.until_waiting(1)  # the thread is still busy with the piece of the cancelled caller
    held.release.set()
    async with asyncio.timeout(60):
        assert await after == "after"
    assert held.ran == ["after"]
    held.threads.close()


async def test_a_tenant_is_refused_beyond_its_share_and_others_are_not() -> None:
    held = HeldThreads(max_waiting=4)
    tasks = [held.start("many", f"many {n}", admitted=False) for n in range(4)]
    await held.until_waiting(4)
    with pytest.raises(Overloaded):
        await held.start("many", "too many", admitted=False)
    tasks.append(held.start("few", "few 0", admitted=False))  # two tenants: a half for each
    tasks.append(held.start("few", "few 1", admitted=False))
    await held.until_waiting(6)
    with pytest.raises(Overloaded):
        await held.start("few", "few 2", admitted=False)
    tasks.append(held.start("many", "admitted"))  # a request that runs is never refused
    await held.until_waiting(7)
    held.release.set()
    async with asyncio.timeout(60):
        await asyncio.gather(held.holder, *tasks)
    assert sorted(held.ran) == sorted([*[f"many {n}" for n in range(4)], "few 0", "few 1", "admitted"])
    held.threads.close()

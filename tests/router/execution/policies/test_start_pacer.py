"""StartPacer: requests start in order and a few per loop iteration; cancelled ones delay no other."""

from __future__ import annotations

import asyncio

from services.router.execution.policies.start_pacer import StartPacer


async def test_a_burst_starts_in_order_and_a_few_per_iteration() -> None:
    pacer, started, iteration = StartPacer(per_iteration=3), [], 0
    done = asyncio.Event()

    async def work(number: int) -> None:
        await pacer.acquire("anna")
        started.append((number, iteration))
        if number == 19:
            done.set()

    tasks = [asyncio.create_task(work(number)) for number in range(20)]
    async with asyncio.timeout(60):
        while not done.is_set():
            iteration += 1
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert [number for number, _ in started] == list(range(20))
    by_iteration = [started_in for _, started_in in started]
    assert max(by_iteration.count(started_in) for started_in in by_iteration) <= 3
    await asyncio.wait_for(pacer.acquire("anna"), 60)  # a lone request starts at once


async def test_a_cancelled_request_delays_no_other() -> None:
    pacer = StartPacer(per_iteration=1)
    tasks = [asyncio.create_task(pacer.acquire("anna")) for _ in range(6)]
    await asyncio.sleep(0)
    for task in tasks[2:4]:
        task.cancel()
    async with asyncio.timeout(60):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [False] * 2 + [True] * 2 + [
        False
    ] * 2


async def test_tenants_start_in_turn() -> None:
    """A tenant whose worker was lost with hundreds of requests delays the start of another one by one."""
    pacer, started, faults = StartPacer(per_iteration=1), list[str](), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))

    async def start(tenant: str) -> None:
        await pacer.acquire(tenant)
        started.append(tenant)

    await asyncio.gather(*[start("anna") for _ in range(9)], start("bert"), start("carl"))
    assert started == ["anna", "anna", "bert", "carl", *["anna"] * 7]
    await asyncio.sleep(0)
    assert not faults

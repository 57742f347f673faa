"""Tenants take turns at the database: a tenant with much work delays others by an item of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence

import pytest

from libs.database import thread
from libs.database.database import Database, open_database
from libs.database.transaction import SqlTransaction
from libs.database.work_queue import DatabaseWork, WorkQueue
from slipstream.errors import Overloaded


def _work(tenant: str) -> DatabaseWork:
    return DatabaseWork(lambda tx: None, 0.0, tenant=tenant)


def _tenants(works: Sequence[DatabaseWork]) -> str:
    return "".join(work.tenant or "-" for work in works)


def test_each_tenant_has_a_turn() -> None:
    queue = WorkQueue(100)
    for tenant in ("a", "a", "a", "b", "", "b"):
        queue.put(_work(tenant))
    assert len(queue) == 6
    assert _tenants(queue.take(2)) == "ab"
    queue.put(_work("c"))
    assert _tenants(queue.take(100)) == "-abca"
    assert len(queue) == 0


def test_what_is_put_back_is_first_of_its_tenant() -> None:
    queue = WorkQueue(100)
    first, second, third = works = [_work("a") for _ in range(3)]
    for work in works:
        queue.put(work)
    assert queue.take(2) == [first, second]
    assert first.begin() and second.begin()
    queue.put_back([first, second])
    assert queue.take(9) == [first, second, third]
    assert first.begin()  # again


def test_a_tenant_has_half_of_the_places() -> None:
    queue = WorkQueue(4)
    queue.put(_work("a"))
    queue.put(_work("a"))
    with pytest.raises(Overloaded):
        queue.put(_work("a"))
    queue.put(_work("b"))
    queue.put(_work(""))
    with pytest.raises(Overloaded):
        queue.put(_work("c"))


async def test_reads_of_one_tenant_delay_those_of_another_by_one(database: Database) -> None:
    order: list[str] = []
    opened = threading.Event()

    def read(name: str) -> None:
        opened.wait(30)
        order.append(name)

    reads = [asyncio.create_task(database.read(lambda tx: read("a"), tenant="a")) for _ in range(20)]
    while len(asyncio.all_tasks()) < 21 or database.waiting < 19:  # the first one is read
        await asyncio.sleep(0.01)
    reads.append(asyncio.create_task(database.read(lambda tx: read("b"), tenant="b")))
    while database.waiting < 20:
        await asyncio.sleep(0.01)
    opened.set()
    await asyncio.gather(*reads)
    assert order.index("b") <= 2


async def test_a_long_transaction_is_committed_before_what_waits_with_it(
    database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "GROUP_S", 0.005)
    opened, ended = threading.Event(), list[int]()
    seen: list[int] = []

    def write(tx: SqlTransaction, number: int) -> None:
        opened.wait(30)
        time.sleep(0.01)  # a long piece of work
        until_s = time.monotonic() + 30
        while number == 8 and len(ended) < 3 and time.monotonic() < until_s:
            time.sleep(0.01)  # the loop may hear late of what was committed
        seen.append(len(ended))

    async def run(number: int) -> None:
        await database.run(lambda tx: write(tx, number), tenant="a")
        ended.append(number)

    first = asyncio.create_task(run(0))
    while database.waiting:
        await asyncio.sleep(0.01)
    others = [asyncio.create_task(run(number)) for number in range(1, 9)]
    await asyncio.sleep(0)
    opened.set()
    await asyncio.gather(first, *others)
    assert seen[-1] >= 3
    assert sorted(ended) == list(range(9))
    again = open_database(database_url)
    assert await again.read(lambda tx: 1) == 1
    await again.close()

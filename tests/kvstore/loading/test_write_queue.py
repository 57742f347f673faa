"""The write queue is ordered, bounded and without duplicates; callers can wait until it is idle."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kvstore.loading.write_queue import WriteQueue
from tests.kvstore.disk.test_disk_faults import Gate, Rig, key, opened

BOUND = 4
WHAT = st.sampled_from(["add", "add", "add", "remove", "give up", "first"])


@given(steps=st.lists(st.tuples(WHAT, st.integers(0, 9))))
def test_the_queue_is_ordered_bounded_and_without_duplicates(
    steps: list[tuple[str, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.kvstore.loading.write_queue.MAX_WAITING_BLOCKS", BOUND)
        reported: list[bytes] = []
        waiting, line, gone = WriteQueue(reported.append), list[bytes](), list[bytes]()
        for step, number in steps:
            name = bytes([number])
            if step == "add":
                waiting.add(name)
                line += [name] if name not in line else []
                gone += line[:-BOUND]
                line = line[-BOUND:]
            elif step == "first":
                assert not line or waiting.first() == line[0]
            else:
                (waiting.remove if step == "remove" else waiting.discard)(name)
                line = [each for each in line if each != name]
                gone += [name] if step == "give up" else []
            assert list(waiting) == line and len(waiting) == len(line) and (name in waiting) == (name in line)
            assert reported == gone and waiting.dropped_blocks == len(gone)


async def test_wait_idle_returns_when_idle_or_on_time_out() -> None:
    waiting = WriteQueue(lambda key: None)
    assert await waiting.wait_idle(timeout_s=0.01)
    waiting.set_idle(False)
    assert not await waiting.wait_idle(timeout_s=0.01)
    until = asyncio.create_task(waiting.wait_idle(timeout_s=60))
    await asyncio.sleep(0)
    waiting.set_idle(True)
    assert await until


async def test_a_discarded_block_ends_its_waiters_and_stays_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.kvstore.loading.write_queue.MAX_WAITING_BLOCKS", BOUND)
    monkeypatch.setattr("services.kvstore.disk.set.MAX_WRITING_BLOCKS", 1)
    async for rig in opened(1):
        await abandoned(rig)


async def abandoned(rig: Rig) -> None:
    write_behind, gate = rig.store.write_behind, Gate("pwritev")
    assert write_behind is not None
    rig.disks[0].before = gate
    gate.open.clear()
    rig.publish(0)  # being written
    for number in range(1, 3):
        rig.publish(number)
    durable = asyncio.create_task(rig.store.durable([key(1), key(2)], timeout_s=60))
    await asyncio.sleep(0)
    for number in range(3, 3 + BOUND):
        rig.publish(number)
    assert write_behind.dropped_blocks == 2 and write_behind.waiting == 1 + BOUND
    assert await durable == []
    assert all(rig.dram.get(key(number)) is not None for number in range(3 + BOUND))
    gate.open.set()
    assert await write_behind.flush(timeout_s=60)
    on_disk = [rig.set.contains(key(number)) for number in range(3 + BOUND)]
    assert on_disk == [True, False, False, *[True] * BOUND]

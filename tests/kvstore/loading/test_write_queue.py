"""What waits to be written is in order, each once, bounded; and who waits for it to be done is told."""

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
def test_it_is_a_line_in_which_each_stands_once_and_the_first_goes_when_it_is_too_long(
    steps: list[tuple[str, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.kvstore.loading.write_queue.MAX_WAITING_BLOCKS", BOUND)
        told: list[bytes] = []
        waiting, line, gone = WriteQueue(told.append), list[bytes](), list[bytes]()
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
            assert told == gone and waiting.dropped_blocks == len(gone)


async def test_who_waits_until_it_is_idle_is_told_or_gives_up() -> None:
    waiting = WriteQueue(lambda key: None)
    assert await waiting.wait_idle(timeout_s=0.01)
    waiting.set_idle(False)
    assert not await waiting.wait_idle(timeout_s=0.01)
    until = asyncio.create_task(waiting.wait_idle(timeout_s=60))
    await asyncio.sleep(0)
    waiting.set_idle(True)
    assert await until


async def test_a_block_that_is_given_up_is_not_waited_for_and_stays_in_memory(
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

"""PageQueue: first in, first out, bounded, without leaks of cancelled reservations."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from libs.engine.core.fake import build_fake_engine
from libs.engine.step.types import SamplingParams, SequenceSpec
from libs.worker.engine.engine_thread import EngineThread
from libs.worker.engine.page_queue import PageQueue
from slipstream.errors import InvalidArgument, NotFound, Overloaded
from tests.worker.engine.test_engine_thread import Listener
from tests.worker.nodes import WAIT_S, Gate, eventually


def spec(seq_id: str, n_tokens: int, first: int = 0) -> SequenceSpec:
    prompt = np.arange(first, first + n_tokens, dtype=np.uint32)
    return SequenceSpec(seq_id, prompt, SamplingParams(max_tokens=4))


async def open_queue(n_pages: int = 4, **bounds: int) -> tuple[EngineThread, PageQueue]:
    thread = EngineThread(lambda: build_fake_engine(n_pages=n_pages, block_tokens=4), Listener())
    await thread.start()
    return thread, PageQueue(thread, **{"max_waiting": 2, "max_running": 8, **bounds})


async def open_held_queue(n_pages: int) -> tuple[Gate, EngineThread, PageQueue]:
    """Open a queue over an engine whose steps end when the gate is opened."""
    gate = Gate()
    thread = EngineThread(
        lambda: build_fake_engine(n_pages=n_pages, block_tokens=4, pace_s_per_token=1, sleep=gate), Listener()
    )
    await thread.start()
    return gate, thread, PageQueue(thread, max_waiting=2, max_running=8)


async def test_a_short_reservation_does_not_overtake_a_long_one() -> None:
    thread, queue = await open_queue()
    await queue.reserve(spec("a", 10))  # 3 of 4 pages
    long = asyncio.create_task(queue.reserve(spec("long", 9, 100)))
    await asyncio.sleep(0)
    short = asyncio.create_task(queue.reserve(spec("short", 2, 200)))
    await eventually(lambda: queue.waiting == 2)
    with pytest.raises(Overloaded):
        await queue.reserve(spec("refused", 2, 300))
    assert not short.done()
    await queue.release("a")
    await long
    assert queue.running == 2 or not short.done()
    await asyncio.wait_for(short, 60)
    for seq_id in ("long", "short", "refused"):
        await queue.release(seq_id)
    assert (queue.waiting, queue.running) == (0, 0)
    assert thread.ledger.pages_held == 0
    await thread.stop()


async def test_a_cancelled_reservation_holds_nothing() -> None:
    thread, queue = await open_queue()
    await queue.reserve(spec("a", 14))
    waiter = asyncio.create_task(queue.reserve(spec("b", 4, 100)))
    await eventually(lambda: queue.waiting == 1)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    await queue.release("b")
    await queue.release("a")
    await queue.release("a")
    assert (queue.waiting, queue.running) == (0, 0)
    assert thread.ledger.pages_held == 0
    await thread.stop()


async def test_a_reservation_larger_than_the_cache_is_refused_at_once() -> None:
    thread, queue = await open_queue()
    with pytest.raises(InvalidArgument):
        await queue.reserve(spec("a", 100))
    assert (queue.waiting, queue.running) == (0, 0)
    await thread.stop()


async def test_the_number_of_running_sequences_is_bounded() -> None:
    thread, queue = await open_queue(n_pages=16, max_running=1)
    await queue.reserve(spec("a", 2))
    waiter = asyncio.create_task(queue.reserve(spec("b", 2, 100)))
    await eventually(lambda: queue.waiting == 1)
    await queue.release("a")
    await asyncio.wait_for(waiter, 60)
    await queue.release("b")
    await thread.stop()


async def test_releasing_a_waiting_sequence_does_not_wait_for_the_step() -> None:
    """A sequence without pages is removed at once, even during a step that does not end."""
    gate, thread, queue = await open_held_queue(4)
    await queue.reserve(spec("a", 14))
    await thread.call(lambda engine: engine.start("a"))
    await eventually(lambda: gate.arrived == 1)
    waiter = asyncio.create_task(queue.reserve(spec("b", 4, 100)))
    await eventually(lambda: queue.waiting == 1)
    waiter.cancel()
    await asyncio.gather(waiter, return_exceptions=True)
    async with asyncio.timeout(WAIT_S):
        await queue.release("b")
    assert gate.arrived == 1
    assert queue.waiting == 0
    gate.open()
    await queue.release("a")
    await eventually(lambda: thread.ledger.pages_held == 0)
    assert (queue.running, thread.ledger.sequences) == (0, 0)
    await thread.stop()


async def test_a_sequence_without_rows_in_the_step_is_released_during_it() -> None:
    """Its pages are free although the step does not end, and go to the next reservation."""
    gate, thread, queue = await open_held_queue(8)
    await queue.reserve(spec("runs", 10))
    await queue.reserve(spec("reads", 14, 100))
    await thread.call(lambda engine: engine.start("runs"))
    await eventually(lambda: gate.arrived == 1)
    held = thread.ledger.pages_held
    waiter = asyncio.create_task(queue.reserve(spec("waits", 14, 200)))
    late = thread.submit(lambda engine: engine.start("reads"))  # a start that comes after the release
    await eventually(lambda: queue.waiting == 1)
    async with asyncio.timeout(WAIT_S):
        await queue.release("reads")
    assert gate.arrived == 1
    assert not waiter.done()
    assert (thread.ledger.pages_held, thread.ledger.sequences_reserved) == (held - 4, 0)
    gate.open()
    with pytest.raises(NotFound):
        await late
    await waiter
    await queue.release("waits")
    await queue.release("runs")
    await eventually(lambda: thread.ledger.pages_held == 0)
    await thread.stop()


async def test_a_waiting_reservation_is_notified_of_every_free_page() -> None:
    """The queue does not poll: unpins, cancelled reservations and releases all notify it."""
    thread, queue = await open_queue()
    reservation = await queue.reserve(spec("a", 14))
    await thread.call(lambda engine: engine.pin(reservation.pages))
    waiter = asyncio.create_task(queue.reserve(spec("b", 14, 100)))
    await eventually(lambda: queue.waiting == 1)
    await queue.release("a")
    assert thread.ledger.pages_held == 4
    for page in reservation.pages:
        assert not waiter.done()
        await thread.call(lambda engine, page=page: engine.unpin([page]))  # type: ignore[misc]
    await asyncio.wait_for(waiter, WAIT_S)
    left = asyncio.create_task(queue.reserve(spec("c", 14, 200)))
    await eventually(lambda: queue.waiting == 1)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await queue.release("b")
    await eventually(lambda: not any(t.get_name() == "page queue" for t in asyncio.all_tasks()))
    await thread.stop()

"""The pipe between a request and its face: joined deltas say what single ones say; the buffer is bounded."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.common import errors
from services.router.event_pipe import EventPipe, join, size_of
from services.router.stall_timer import StallTimer
from slipstream.v1 import router_pb2

_calls = st.lists(
    st.builds(
        router_pb2.ToolCallDelta,
        index=st.integers(0, 2),
        id=st.sampled_from(["", "a"]),
        arguments=st.text("xy", max_size=3),
    ),
    max_size=2,
)
_deltas = st.lists(
    st.builds(
        router_pb2.Delta,
        text=st.text("ab", max_size=4),
        reasoning=st.text("cd", max_size=4),
        tool_calls=_calls,
        logprobs=st.lists(st.builds(router_pb2.TextLogprob, token=st.text("t", max_size=1)), max_size=2),
        completion_tokens=st.integers(0, 9),
    ),
    max_size=12,
)


def _said(deltas: list[router_pb2.Delta]) -> list[str]:
    """What a client makes of them: characters in order with their kind, then the log probabilities."""
    said: list[str] = []
    for delta in deltas:
        said += [f"r{c}" for c in delta.reasoning] + [f"t{c}" for c in delta.text]
        for call in delta.tool_calls:
            said += [f"id{call.index}"] * bool(call.id) + [f"{call.index}{c}" for c in call.arguments]
    return said


@settings(max_examples=150, deadline=None)
@given(_deltas)
def test_joining_keeps_what_is_said_and_its_size(deltas: list[router_pb2.Delta]) -> None:
    joined: list[router_pb2.Delta] = []
    for delta in deltas:
        copy = router_pb2.Delta()
        copy.CopyFrom(delta)
        if not (joined and join(joined[-1], copy)):
            joined.append(copy)
    assert _said(joined) == _said(deltas)
    assert sum(map(size_of, joined)) == sum(map(size_of, deltas))
    assert [p for d in joined for p in d.logprobs] == [p for d in deltas for p in d.logprobs]
    if deltas:
        assert joined[-1].completion_tokens == deltas[-1].completion_tokens


async def test_a_writer_waits_for_a_reader_and_nothing_is_lost() -> None:
    pipe = EventPipe(max_waiting_bytes=100)
    texts = [str(number).zfill(10) for number in range(200)]
    most = 0

    async def write() -> None:
        nonlocal most
        for text in texts:
            await pipe.put(router_pb2.GenerateResponse(delta=router_pb2.Delta(text=text)))
            most = max(most, pipe.waiting_bytes)
        pipe.close()

    writer = asyncio.create_task(write())
    got = ""
    async with asyncio.timeout(10):
        while not writer.done() and pipe.waiting_bytes < 100:
            await asyncio.sleep(0)
        assert not writer.done()
        async for event in pipe.events():
            got += event.delta.text
            await asyncio.sleep(0)
    assert got == "".join(texts)
    assert most <= 110
    assert pipe.waiting_bytes == 0


async def test_the_error_comes_after_what_waits() -> None:
    pipe = EventPipe()
    await pipe.put(router_pb2.GenerateResponse(delta=router_pb2.Delta(text="a")))
    pipe.close(errors.Unavailable("gone"))
    events = pipe.events()
    assert (await anext(events)).delta.text == "a"
    with pytest.raises(errors.Unavailable):
        await anext(events)


async def test_only_a_write_that_lasts_is_a_stall() -> None:
    stalled = asyncio.Event()
    timer = StallTimer(1.0, stalled.set)
    for _ in range(6):  # together longer than the limit, each of them far from it
        timer.begin()
        await asyncio.sleep(0.2)
        timer.end()
    assert not stalled.is_set()
    timer.begin()
    await asyncio.wait_for(stalled.wait(), 10)
    timer.close()

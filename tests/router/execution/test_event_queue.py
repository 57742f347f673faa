"""The pipe between a request and its face: joined deltas say what single ones say; the buffer is bounded."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.execution.event_queue import ResponseQueue, join, size_of
from slipstream import errors
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
    pipe = ResponseQueue(max_waiting_bytes=100)
    texts = [str(number).zfill(10) for number in range(200)]
    most = 0

    async def write() -> None:
        nonlocal most
        for text in texts:
            await pipe.put(router_pb2.GenerateEvent(delta=router_pb2.Delta(text=text)))
            most = max(most, pipe.waiting_bytes)
        pipe.close()

    writer = asyncio.create_task(write())
    got = ""
    async with asyncio.timeout(60):
        while not writer.done() and pipe.waiting_bytes < 100:
            await asyncio.sleep(0)
        assert not writer.done()
        while (event := await pipe.next_event()) is not None:
            got += event.delta.text
            await asyncio.sleep(0)
    assert got == "".join(texts)
    assert most <= 110
    assert pipe.waiting_bytes == 0


async def test_the_error_comes_after_what_waits() -> None:
    pipe = ResponseQueue()
    await pipe.put(router_pb2.GenerateEvent(delta=router_pb2.Delta(text="a")))
    pipe.close(errors.Unavailable("gone"))
    event = await pipe.next_event()
    assert event is not None
    assert event.delta.text == "a"
    with pytest.raises(errors.Unavailable):
        await pipe.next_event()


def _started() -> router_pb2.GenerateEvent:
    return router_pb2.GenerateEvent(started=router_pb2.Started(prompt_tokens=3))


def _delta(text: str) -> router_pb2.GenerateEvent:
    return router_pb2.GenerateEvent(delta=router_pb2.Delta(text=text))


async def test_the_start_goes_with_the_first_token() -> None:
    pipe = ResponseQueue()
    reader = asyncio.create_task(pipe.next_response())
    await asyncio.sleep(0)
    await pipe.put(_started())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not reader.done()
    await pipe.put(_delta("a"))
    first = await reader
    assert first is not None
    started, delta = first.events
    assert started.HasField("started")
    assert delta.delta.text == "a"
    assert pipe.waiting_bytes == 0
    pipe.close()
    assert await pipe.next_response() is None


async def test_the_start_goes_alone_when_it_is_told() -> None:
    pipe = ResponseQueue()
    reader = asyncio.create_task(pipe.next_response())
    await asyncio.sleep(0)
    assert not pipe.send_start()
    await pipe.put(_started())
    assert pipe.send_start()
    first = await reader
    assert first is not None
    assert [event.WhichOneof("kind") for event in first.events] == ["started"]
    await pipe.put(_delta("a"))
    second = await pipe.next_response()
    assert second is not None
    assert [event.delta.text for event in second.events] == ["a"]


@pytest.mark.parametrize("told", [False, True])
async def test_an_error_after_the_start_is_not_lost(told: bool) -> None:
    pipe = ResponseQueue()
    await pipe.put(_started())
    pipe.close(errors.Unavailable("gone"))
    if told:
        pipe.send_start()
        first = await pipe.next_response()
        assert first is not None
        assert first.events[0].HasField("started")
    with pytest.raises(errors.Unavailable):
        await pipe.next_response()


async def test_who_waits_for_more_than_the_start_is_not_woken_for_it() -> None:
    pipe = ResponseQueue()
    more = asyncio.create_task(pipe.next_events(beyond_start=True))
    await asyncio.sleep(0)
    await pipe.put(router_pb2.GenerateEvent(started=router_pb2.Started(request_id="r", prompt_tokens=1)))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not more.done()
    await pipe.put(router_pb2.GenerateEvent(delta=router_pb2.Delta(text="a")))
    async with asyncio.timeout(60):
        opening, event = await more
    assert (opening.started.request_id, event.delta.text) == ("r", "a")


async def test_an_error_after_the_start_is_told_instead_of_it() -> None:
    pipe = ResponseQueue()
    await pipe.put(router_pb2.GenerateEvent(started=router_pb2.Started(request_id="r", prompt_tokens=1)))
    pipe.close(errors.Unavailable("no worker"))
    with pytest.raises(errors.Unavailable):
        await pipe.next_events(beyond_start=True)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=12))
def test_who_is_given_deltas_at_once_gets_each_once_and_in_order(plan: list[tuple[bool, bool, bool]]) -> None:
    """Of each delta: whether it is taken at once where it can be, whether it comes alone, and whether the
    reader runs before it."""

    async def run() -> None:
        pipe, got, willing = ResponseQueue(), "", True

        def on_delta(delta: router_pb2.Delta) -> bool:
            nonlocal got
            got += delta.text if willing else ""
            return willing

        async def read() -> None:
            nonlocal got
            while events := await pipe.next_events():
                got += "".join(event.delta.text for event in events)

        reader = asyncio.create_task(read())
        pipe.on_delta = on_delta
        for index, (takes, alone, pause) in enumerate(plan):
            willing = takes
            if pause:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            event = router_pb2.GenerateEvent()
            event.delta.text, event.delta.completion_tokens = f"{index},", index + 1
            if alone:
                pipe.put_delta(event, alone=True)
            else:
                await pipe.put(event)
        pipe.close()
        await asyncio.wait_for(reader, 60)
        assert got == "".join(f"{index}," for index in range(len(plan)))
        assert pipe.completion_tokens == len(plan)
        assert pipe.waiting_bytes == 0

    asyncio.run(run())


async def test_a_delta_that_others_come_with_waits_for_them() -> None:
    pipe, taken = ResponseQueue(), []

    def on_delta(delta: router_pb2.Delta) -> bool:
        taken.append(delta.text)
        return True

    pipe.on_delta = on_delta
    reading = asyncio.create_task(pipe.next_events())
    await asyncio.sleep(0)
    pipe.put_delta(router_pb2.GenerateEvent(delta=router_pb2.Delta(text="alone")), alone=True)
    await pipe.put(router_pb2.GenerateEvent(delta=router_pb2.Delta(text="last")))
    await pipe.put(router_pb2.GenerateEvent(finished=router_pb2.Finished()))
    async with asyncio.timeout(60):
        last, finished = await reading
    assert (taken, last.delta.text, finished.HasField("finished")) == (["alone"], "last", True)

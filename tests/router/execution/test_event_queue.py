"""The sink of a request: joined deltas equal single ones, and the buffer is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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


def _rendered(deltas: list[router_pb2.Delta]) -> list[str]:
    """Return the characters that a client sees, in order and with their kind."""
    rendered: list[str] = []
    for delta in deltas:
        rendered += [f"r{c}" for c in delta.reasoning] + [f"t{c}" for c in delta.text]
        for call in delta.tool_calls:
            rendered += [f"id{call.index}"] * bool(call.id) + [f"{call.index}{c}" for c in call.arguments]
    return rendered


@given(_deltas)
def test_joining_deltas_keeps_their_content_and_size(deltas: list[router_pb2.Delta]) -> None:
    joined: list[router_pb2.Delta] = []
    for delta in deltas:
        copy = router_pb2.Delta()
        copy.CopyFrom(delta)
        if not (joined and join(joined[-1], copy)):
            joined.append(copy)
    assert _rendered(joined) == _rendered(deltas)
    assert sum(map(size_of, joined)) == sum(map(size_of, deltas))
    assert [p for d in joined for p in d.logprobs] == [p for d in deltas for p in d.logprobs]
    if deltas:
        assert joined[-1].completion_tokens == deltas[-1].completion_tokens


def _started(request_id: str = "r") -> router_pb2.GenerateEvent:
    return router_pb2.GenerateEvent(started=router_pb2.Started(request_id=request_id, prompt_tokens=3))


def _delta(text: str) -> router_pb2.GenerateEvent:
    return router_pb2.GenerateEvent(delta=router_pb2.Delta(text=text))


class Writer:
    """A producer that writes texts while the queue is not full."""

    def __init__(self, sink: ResponseQueue, texts: list[str]) -> None:
        self.sink, self.texts, self.most = sink, texts, 0
        sink.producer = self

    def resume(self) -> None:
        while self.texts and not self.sink.is_full:
            self.sink.write([_delta(self.texts.pop(0))])
            self.most = max(self.most, self.sink.waiting_bytes)
        if not self.texts:
            self.sink.close()


async def test_a_producer_is_resumed_by_the_reader_and_nothing_is_lost() -> None:
    sink = ResponseQueue(max_waiting_bytes=100)
    texts = [str(number).zfill(10) for number in range(200)]
    writer = Writer(sink, list(texts))
    writer.resume()
    assert sink.is_full and writer.texts
    got = ""
    async with asyncio.timeout(60):
        while events := await sink.next_events():
            got += "".join(event.delta.text for event in events)
            await asyncio.sleep(0)
    assert got == "".join(texts)
    assert writer.most <= 110
    assert sink.waiting_bytes == 0


async def test_an_error_comes_after_waiting_events() -> None:
    sink = ResponseQueue()
    sink.write([_delta("a")])
    sink.close(errors.Unavailable("gone"))
    (event,) = await sink.next_events()
    assert event.delta.text == "a"
    with pytest.raises(errors.Unavailable):
        await sink.next_events()


async def test_the_start_event_comes_alone_and_once() -> None:
    """A preempted request starts again, but its client gets only one start event."""
    sink = ResponseQueue()
    reader = asyncio.create_task(sink.next_events())
    await asyncio.sleep(0)
    sink.write([_started("first")])
    (first,) = await reader
    assert first.started.request_id == "first"
    sink.write([_started("again")])
    sink.write([_delta("a")])
    (second,) = await sink.next_events()
    assert second.delta.text == "a"


async def test_the_start_event_wakes_no_reader_that_waits_for_more() -> None:
    sink = ResponseQueue()
    sink.holds_start = True
    more = asyncio.create_task(sink.next_events())
    await asyncio.sleep(0)
    sink.write([_started()])
    for _ in range(3):
        await asyncio.sleep(0)
    assert not more.done()
    sink.write([_delta("a")])
    async with asyncio.timeout(60):
        opening, event = await more
    assert (opening.started.request_id, event.delta.text) == ("r", "a")


async def test_an_error_replaces_an_unread_start_event() -> None:
    sink = ResponseQueue()
    sink.holds_start = True
    sink.write([_started()])
    sink.close(errors.Unavailable("no worker"))
    with pytest.raises(errors.Unavailable):
        await sink.next_events()


async def test_a_released_start_event_comes_alone() -> None:
    sink = ResponseQueue()
    sink.holds_start = True
    reader = asyncio.create_task(sink.next_events())
    await asyncio.sleep(0)
    sink.release_start()
    await asyncio.sleep(0)
    assert not reader.done()  # no start event exists yet
    sink.write([_started()])
    async with asyncio.timeout(60):
        (opening,) = await reader
    assert opening.started.request_id == "r"


class FakeConnection:
    """A connection that accepts events while the test allows it."""

    def __init__(self) -> None:
        self.got = ""
        self.is_willing = True

    def try_write(self, events: Sequence[router_pb2.GenerateEvent]) -> bool:
        if self.is_willing and not events[-1].HasField("finished"):
            self.got += "".join(event.delta.text for event in events)
            return True
        return False


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 2), st.booleans()), max_size=12))
def test_a_connection_and_the_reader_get_each_delta_once_and_in_order(
    plan: list[tuple[bool, int, bool]],
) -> None:
    """Each write has: whether the connection accepts it, its deltas, whether the reader runs before it."""

    async def run() -> None:
        sink, client = ResponseQueue(), FakeConnection()

        async def read() -> None:
            while events := await sink.next_events():
                client.got += "".join(event.delta.text for event in events)

        reader = asyncio.create_task(read())
        sink.direct_writer = client
        count = 0
        for is_willing, n_deltas, rests in plan:
            client.is_willing = is_willing
            if rests:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            events = [_delta(f"{count + n},") for n in range(n_deltas)]
            for event in events:
                count += 1
                event.delta.completion_tokens = count
            sink.write(events)
        sink.close()
        await asyncio.wait_for(reader, 60)
        assert client.got == "".join(f"{number}," for number in range(count))
        assert sink.completion_tokens == count
        assert sink.waiting_bytes == 0

    asyncio.run(run())


async def test_the_last_delta_travels_with_the_end() -> None:
    sink, client = ResponseQueue(), FakeConnection()
    sink.direct_writer = client
    reading = asyncio.create_task(sink.next_events())
    await asyncio.sleep(0)
    sink.write([_delta("alone")])
    sink.write([_delta("last"), router_pb2.GenerateEvent(finished=router_pb2.Finished())])
    async with asyncio.timeout(60):
        last, finished = await reading
    assert (client.got, last.delta.text, finished.HasField("finished")) == ("alone", "last", True)


async def test_a_request_that_fails_while_started_waits_shows_no_event() -> None:
    sink = ResponseQueue()
    sink.holds_start = True
    sink.write([_started()])
    sink.close(errors.Unavailable("gone"))
    with pytest.raises(errors.Unavailable):
        await sink.next_events()

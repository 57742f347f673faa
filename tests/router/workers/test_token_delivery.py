"""Tokens from a decode worker's frames to the tasks that wait for them: order, rounds, bounds."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.common.block_hash import as_tokens
from services.decode.frame_buffer import FrameBuffer
from services.router.event_loop_lag import LagWindow
from services.router.workers.decode_sequence import MAX_PARKED_TOKENS, RemoteSequence
from services.router.workers.decode_stream import DecodeClient, frame_interval_ms
from services.router.workers.idle_wait import NewsWait
from services.router.workers.prompt_delta import OutgoingPrompt
from services.router.workers.token_batcher import MAX_PAUSE_S, TokenBatcher
from slipstream import errors
from slipstream.v1 import common_pb2, decode_pb2

_SEQUENCES = 3
_PROMPT = OutgoingPrompt(as_tokens([1]), [], root=bytes(16), salt=b"", block_tokens=16)


class _Channel:
    """A channel nobody calls: frames are handed to the stream by the test."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_options: None


class _Call:
    def __init__(self) -> None:
        self._ended = asyncio.Event()

    async def write(self, _request: object) -> None:
        await asyncio.Event().wait()

    def __aiter__(self) -> _Call:
        return self

    async def __anext__(self) -> object:
        await self._ended.wait()
        raise StopAsyncIteration

    def cancel(self) -> None:
        self._ended.set()


def _stream() -> DecodeClient:
    stream = DecodeClient(_Channel(), instance="decode-0")  # type: ignore[arg-type]
    stream._stub = type("Stub", (), {"Decode": staticmethod(lambda metadata=(): _Call())})()
    return stream


def _attempt(index: int) -> common_pb2.Attempt:
    return common_pb2.Attempt(request_id=f"r{index}", attempt=1)


_steps = st.lists(st.lists(st.integers(0, 3), min_size=_SEQUENCES, max_size=_SEQUENCES), max_size=20)


@settings(max_examples=40, deadline=None)
@given(_steps, st.integers(1, 4), st.sets(st.integers(0, _SEQUENCES - 1)), st.booleans())
def test_every_token_arrives_once_and_in_order_packed_or_not(
    steps: list[list[int]], max_frames: int, named: set[int], paced: bool
) -> None:
    """From a worker's outbox, with and without handles and a pace, through the stream to `next`."""

    async def run() -> None:
        stream, outbox = _stream(), FrameBuffer(max_frames=max_frames)
        sequences = []
        for index in range(_SEQUENCES):
            start = decode_pb2.StartSequence(attempt=_attempt(index))
            sequences.append(stream.start(start, _PROMPT))
            outbox.name(f"r{index}", 1, start.handle if index in named else 0)
        sent: list[list[int]] = [[] for _ in sequences]
        count = 0

        def delta(index: int, n: int) -> decode_pb2.SequenceDelta:
            nonlocal count
            tokens = list(range(count, count + n))
            count += n
            sent[index] += tokens
            packed = np.asarray(tokens, "<u4").tobytes()
            return decode_pb2.SequenceDelta(request_id=f"r{index}", attempt=1, tokens=packed)

        for step in steps:
            outbox.push([delta(index, n) for index, n in enumerate(step) if n], join=paced)
            if len(outbox) == max_frames:
                stream.take(outbox.take() or decode_pb2.DecodeResponse())
        last = [delta(index, 1) for index in range(_SEQUENCES)]
        for item in last:
            item.finish_reason = common_pb2.FINISH_REASON_LENGTH
        outbox.push(last, join=paced)
        while (frame := outbox.take()) is not None:
            assert len(frame.packed_handles) == len(frame.packed_tokens)
            stream.take(frame)
        for index, sequence in enumerate(sequences):
            got: list[int] = []
            while True:
                received = await asyncio.wait_for(sequence.next(), 60)
                got += received.tokens
                if received.ended:
                    break
            assert got == sent[index]
            assert sequence.finished
            sequence.forget()
        assert stream.open_sequences == 0
        await stream.close()

    asyncio.run(run())


async def test_a_busy_loop_gets_fewer_rounds_and_no_item_is_lost() -> None:
    delivery = TokenBatcher()
    seen: list[int] = []

    class Item:
        def __init__(self, number: int) -> None:
            self.number = number

        def deliver(self) -> None:
            seen.append(self.number)
            # Serving an item takes a while: time that the next round must wait for.
            until_s = asyncio.get_running_loop().time() + 0.002
            while asyncio.get_running_loop().time() < until_s:
                pass

    for number in range(40):
        delivery.mark(Item(number))
        await asyncio.sleep(0)
    async with asyncio.timeout(60):
        while len(seen) < 40:
            await asyncio.sleep(0.001)
    assert seen == list(range(40))
    assert delivery.rounds < 40


@given(st.lists(st.floats(0.0, MAX_PAUSE_S), max_size=50))
def test_frames_come_as_often_as_rounds_do_and_the_worker_is_seldom_told(pauses_s: list[float]) -> None:
    told_ms = 0
    for pause_s in pauses_s:
        asked_ms = frame_interval_ms(pause_s, told_ms=told_ms)
        assert asked_ms <= pause_s * 1e3
        assert 4 * asked_ms >= int(pause_s * 1e3)
        told_ms = asked_ms
        # From a fresh answer, a pause that grows somewhat changes nothing.
        fresh_ms = frame_interval_ms(pause_s, told_ms=0)
        assert frame_interval_ms(pause_s * 1.25, told_ms=fresh_ms) == fresh_ms or pause_s < 4e-3


async def test_an_end_waits_for_no_round() -> None:
    stream = _stream()
    ends, goes_on = (
        stream.start(decode_pb2.StartSequence(attempt=_attempt(index), ticket=b"t"), _PROMPT)
        for index in range(2)
    )
    last = decode_pb2.SequenceDelta(request_id="r0", attempt=1, tokens=b"\2\0\0\0")
    last.finish_reason = common_pb2.FINISH_REASON_LENGTH
    handles = np.asarray([ends.handle, goes_on.handle], "<u4").tobytes()
    stream.take(decode_pb2.DecodeResponse(packed_handles=handles, packed_tokens=b"\1\0\0\0" * 2))
    stream.take(decode_pb2.DecodeResponse(deltas=[last]))
    assert (ends._delivered, goes_on._delivered) == (True, False)
    arrival = await asyncio.wait_for(ends.next(), 60)
    assert (arrival.tokens, arrival.ended) == ([1, 2], True)
    await asyncio.wait_for(goes_on.next(), 60)
    await stream.close()


async def test_the_first_token_of_a_prompt_computed_there_waits_for_no_round() -> None:
    stream = _stream()
    alone = stream.start(decode_pb2.StartSequence(attempt=_attempt(0)), _PROMPT)
    handed_over = stream.start(decode_pb2.StartSequence(attempt=_attempt(1), ticket=b"t"), _PROMPT)
    for sequence in (alone, handed_over):
        handles = np.asarray([sequence.handle], "<u4").tobytes()
        stream.take(decode_pb2.DecodeResponse(packed_handles=handles, packed_tokens=b"\1\0\0\0"))
    assert (alone._delivered, handed_over._delivered) == (True, False)
    assert (await asyncio.wait_for(handed_over.next(), 60)).tokens == [1]
    await stream.close()


async def test_what_a_client_leaves_unread_is_bounded() -> None:
    stream = _stream()
    sequence = stream.start(decode_pb2.StartSequence(attempt=_attempt(0)), _PROMPT)
    other = stream.start(decode_pb2.StartSequence(attempt=_attempt(1)), _PROMPT)
    for _ in range(2 * MAX_PARKED_TOKENS):
        handles = np.asarray([sequence.handle], "<u4").tobytes()
        stream.take(decode_pb2.DecodeResponse(packed_handles=handles, packed_tokens=b"\1\0\0\0"))
    stream.take(
        decode_pb2.DecodeResponse(
            packed_handles=np.asarray([other.handle], "<u4").tobytes(), packed_tokens=b"\2\0\0\0"
        )
    )
    assert len((await sequence.next()).tokens) <= MAX_PARKED_TOKENS + 1
    with pytest.raises(errors.Aborted, match="unread"):
        await sequence.next()
    assert (await asyncio.wait_for(other.next(), 60)).tokens == [2]
    await stream.close()


def test_the_delay_window_forgets() -> None:
    window = LagWindow(window_s=10)
    assert window.mean_ms == window.max_ms == 0.0
    window.add(0.0, 100.0)
    window.add(1.0, 0.0)
    assert window.max_ms == 100.0
    assert window.mean_ms == 50.0
    window.add(10.5, 2.0)
    assert window.max_ms == 100.0
    window.add(21.0, 4.0)
    assert window.max_ms == 4.0


def _tokens_frame(*sequences: RemoteSequence, token: int) -> decode_pb2.DecodeResponse:
    handles = np.asarray([sequence.handle for sequence in sequences], "<u4").tobytes()
    return decode_pb2.DecodeResponse(
        packed_handles=handles, packed_tokens=np.asarray([token] * len(sequences), "<u4").tobytes()
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30))
def test_tokens_go_on_without_their_reader_once_and_in_order(plan: list[tuple[bool, bool]]) -> None:
    """Of each token: whether who takes it then does, and whether it may be delivered before the next."""

    async def run() -> None:
        stream = _stream()
        sequence = stream.start(decode_pb2.StartSequence(attempt=_attempt(0), ticket=b"t"), _PROMPT)
        got: list[int] = []
        wakes, willing = 0, True

        def on_tokens(tokens: list[int]) -> bool:
            if willing:
                got.extend(tokens)
            return willing

        async def read() -> None:
            nonlocal wakes
            while True:
                arrival = await sequence.next()
                wakes += 1
                got.extend(arrival.tokens)
                if arrival.ended:
                    return

        sequence.on_tokens = on_tokens
        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        for token, (takes, pause) in enumerate(plan):
            willing = takes
            stream.take(_tokens_frame(sequence, token=token))
            if pause:
                await asyncio.sleep(0.001)
        last = decode_pb2.SequenceDelta(request_id="r0", attempt=1)
        last.finish_reason = common_pb2.FINISH_REASON_LENGTH
        stream.take(decode_pb2.DecodeResponse(deltas=[last]))
        await asyncio.wait_for(reader, 60)
        assert got == list(range(len(plan)))
        assert wakes <= 1 + sum(not took for took, _ in plan)  # the end, and what was left
        await stream.close()

    asyncio.run(run())


async def test_who_cannot_take_its_tokens_is_told_and_no_other() -> None:
    stream = _stream()
    broken, other = (
        stream.start(decode_pb2.StartSequence(attempt=_attempt(index), ticket=b"t"), _PROMPT)
        for index in range(2)
    )

    def on_tokens(tokens: list[int]) -> bool:
        raise IndexError(f"no token {tokens[0]}")

    broken.on_tokens = on_tokens
    readers = [asyncio.create_task(sequence.next()) for sequence in (broken, other)]
    await asyncio.sleep(0)
    stream.take(_tokens_frame(broken, other, token=7))
    with pytest.raises(IndexError, match="no token 7"):
        await asyncio.wait_for(readers[0], 60)
    assert (await asyncio.wait_for(readers[1], 60)).tokens == [7]
    await stream.close()


async def test_tokens_that_could_not_be_taken_are_an_error_also_where_the_end_comes_with_them() -> None:
    stream = _stream()
    sequence = stream.start(decode_pb2.StartSequence(attempt=_attempt(0), ticket=b"t"), _PROMPT)

    def on_tokens(tokens: list[int]) -> bool:
        raise errors.Internal(f"no token {tokens[0]}")

    sequence.on_tokens = on_tokens
    reader = asyncio.create_task(sequence.next())
    await asyncio.sleep(0)
    stream.take(_tokens_frame(sequence, token=7))
    last = decode_pb2.SequenceDelta(request_id="r0", attempt=1, tokens=b"\2\0\0\0")
    last.finish_reason = common_pb2.FINISH_REASON_LENGTH
    asyncio.get_running_loop().call_soon(stream.take, decode_pb2.DecodeResponse(deltas=[last]))
    with pytest.raises(errors.Internal, match="no token 7"):
        await asyncio.wait_for(reader, 60)
    await stream.close()


async def test_who_hears_without_waking_is_not_idle() -> None:
    news = NewsWait(asyncio.get_running_loop())
    waiter = news.wait()
    for _ in range(5):
        news.tick()
        news.heard()
    assert news.waiting and not waiter.done()
    news.tick()
    news.tick()
    assert waiter.done() and not news.waiting

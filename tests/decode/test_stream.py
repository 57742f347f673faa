"""A router's stream: steps that wait join, order is kept, and nothing waits longer than the interval."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libs.common.rpc.multiplexed_server import Cancel
from services.decode.sequence import Emit
from services.decode.stream import MAX_INTERVAL_S, DecodeStream, pack_frame
from slipstream.errors import Draining
from slipstream.v1 import common_pb2, decode_pb2

Delta = decode_pb2.SequenceDelta


def _refuse(start: decode_pb2.StartSequence, emit: Emit) -> tuple[asyncio.Task[None], Cancel]:
    raise Draining("this worker is draining")


def _delta(token: int, handle: int = 1, **fields: Any) -> Delta:
    return Delta(handle=handle, tokens=token.to_bytes(4, "little"), **fields)


async def _frame(stream: DecodeStream) -> decode_pb2.DecodeResponse:
    async with asyncio.timeout(60):
        frame = await stream.next_frame()
    assert isinstance(frame, decode_pb2.DecodeResponse)
    return frame


def _unpacked(packed: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(packed, "<u4").tolist()
    return tokens


async def test_without_a_pace_each_step_that_is_taken_is_a_frame() -> None:
    stream = DecodeStream(_refuse)
    for step in range(1, 4):
        stream.put(_delta(step))
        frame = await _frame(stream)
        assert (frame.step, _unpacked(frame.packed_handles), _unpacked(frame.packed_tokens)) == (
            step,
            [1],
            [step],
        )


_steps = st.lists(
    st.tuples(
        st.dictionaries(st.integers(1, 3), st.tuples(st.integers(1, 3), st.booleans()), max_size=3),
        st.booleans(),
    ),
    max_size=40,
)


@given(_steps)
def test_each_sequence_gets_its_tokens_in_order(
    steps: list[tuple[dict[int, tuple[int, bool]], bool]],
) -> None:
    """Of each step: tokens by handle, with log probabilities or without, and whether a frame is taken."""

    async def run() -> None:
        stream = DecodeStream(_refuse)
        sent: dict[int, list[int]] = {}
        received: dict[int, list[int]] = {}
        numbers: list[int] = []
        count = 0

        async def receive() -> None:
            frame = await _frame(stream)
            numbers.append(frame.step)
            packed = _unpacked(frame.packed_handles)
            apart = [delta.handle for delta in frame.deltas]
            assert len(set(apart)) == len(apart) and not set(apart) & set(packed)
            for handle, token in zip(packed, _unpacked(frame.packed_tokens), strict=True):
                received.setdefault(handle, []).append(token)
            for delta in frame.deltas:
                received.setdefault(delta.handle, []).extend(_unpacked(delta.tokens))

        for step, is_taken in steps:
            for handle, (n, has_logprobs) in step.items():
                tokens = list(range(count, count + n))
                count += n
                sent.setdefault(handle, []).extend(tokens)
                logprobs = [common_pb2.PositionLogprobs(logprob=-1.0)] * (n if has_logprobs else 0)
                packed = np.asarray(tokens, "<u4").tobytes()
                stream.put(Delta(handle=handle, tokens=packed, logprobs=logprobs))
            assert len(stream.events) <= 3
            if is_taken and stream.events:
                await receive()
        if stream.events:
            await receive()
        assert received == sent
        assert numbers == list(range(1, len(numbers) + 1))

    asyncio.run(run())


async def test_the_end_survives_joining() -> None:
    stream = DecodeStream(_refuse)
    stats = decode_pb2.SequenceStats(generated_tokens=2)
    stream.put(Delta(handle=1, running=True))
    stream.put(_delta(1))
    stream.put(_delta(9, handle=2))
    stream.put(_delta(2, finish_reason=common_pb2.FINISH_REASON_STOP, stats=stats))
    frame = await _frame(stream)
    (delta,) = frame.deltas
    assert delta.tokens == b"\1\0\0\0\2\0\0\0"
    assert delta.running
    assert delta.finish_reason == common_pb2.FINISH_REASON_STOP
    assert delta.stats.generated_tokens == 2
    assert (_unpacked(frame.packed_handles), _unpacked(frame.packed_tokens)) == ([2], [9])
    assert not stream.events


def test_tokens_alone_travel_packed() -> None:
    frame = pack_frame([_delta(7, handle=3), Delta(handle=4, tokens=b"\1\0\0\0\2\0\0\0")], step=5)
    assert (frame.step, list(frame.deltas)) == (5, [])
    assert _unpacked(frame.packed_handles) == [3, 4, 4]
    assert _unpacked(frame.packed_tokens) == [7, 1, 2]


def test_tokens_that_the_limit_has_changed_do_not() -> None:
    frame = pack_frame([_delta(7, handle=3), _delta(8, handle=4, is_closing=True)], step=5)
    assert [(delta.handle, delta.is_closing) for delta in frame.deltas] == [(4, True)]
    assert _unpacked(frame.packed_tokens) == [7]


async def test_a_start_that_is_refused_fails_alone_and_ends_with_statistics() -> None:
    stream = DecodeStream(_refuse)
    stream.begin(decode_pb2.StartSequence(handle=8))
    (delta,) = (await _frame(stream)).deltas
    assert (delta.handle, delta.failure.reason) == (8, "Draining")
    assert delta.finish_reason == common_pb2.FINISH_REASON_ERROR and delta.HasField("stats")
    assert not stream.running


async def test_a_start_that_breaks_is_logged_with_its_handle(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(start: decode_pb2.StartSequence, emit: Emit) -> tuple[asyncio.Task[None], Cancel]:
        raise KeyError(start.handle)

    stream = DecodeStream(breaks)
    stream.begin(decode_pb2.StartSequence(handle=8))
    (delta,) = (await _frame(stream)).deltas
    assert delta.failure.reason == "Internal"
    assert "command 8 failed" in caplog.text


class StandingClock:
    def time(self) -> float:
        return 0.0


async def test_at_a_pace_steps_join_in_order_and_the_end_is_among_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    rest, sleep = asyncio.Event(), asyncio.sleep

    async def sleeping(seconds: float) -> None:
        slept.append(seconds)
        await rest.wait()

    monkeypatch.setattr(asyncio, "sleep", sleeping)
    stream = DecodeStream(_refuse)
    stream._loop = StandingClock()  # type: ignore[assignment]
    # Held to the worker's own bound.
    await stream.on_request(decode_pb2.DecodeRequest(frame_interval_ms=60_000))
    stream.put(_delta(0))
    assert (await _frame(stream)).packed_tokens == b"\0\0\0\0"
    waiting = asyncio.create_task(_frame(stream))
    for token in (1, 2, 3):
        await sleep(0)
        ended = common_pb2.FINISH_REASON_STOP if token == 3 else common_pb2.FINISH_REASON_UNSPECIFIED
        stream.put(_delta(token, finish_reason=ended))
    await sleep(0)
    assert slept == [MAX_INTERVAL_S]
    rest.set()
    (delta,) = (await waiting).deltas
    assert _unpacked(delta.tokens) == [1, 2, 3]
    assert delta.finish_reason == common_pb2.FINISH_REASON_STOP
    stream.close()
    assert await stream.next_frame() is None

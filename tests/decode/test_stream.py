"""A router's stream at the pace it asked for: steps join, and nothing waits longer than the interval."""

from __future__ import annotations

import asyncio

import pytest

from services.decode.stream import MAX_INTERVAL_S, DecodeStream
from slipstream.v1 import common_pb2, decode_pb2


def _delta(token: int, **fields: object) -> decode_pb2.SequenceDelta:
    return decode_pb2.SequenceDelta(request_id="r", attempt=1, tokens=token.to_bytes(4, "little"), **fields)  # type: ignore[arg-type]


async def _frame(stream: DecodeStream) -> decode_pb2.DecodeResponse:
    async with asyncio.timeout(60):
        frame = await stream.next_frame()
    assert frame is not None
    return frame


async def test_without_a_pace_each_step_is_a_frame() -> None:
    stream = DecodeStream()
    for token in range(3):
        stream.emit(_delta(token))
        stream.flush()
    assert [len((await _frame(stream)).deltas[0].tokens) for _ in range(3)] == [4, 4, 4]


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
    stream = DecodeStream()
    stream._loop = StandingClock()  # type: ignore[assignment]
    stream.pace(60_000)  # held to the worker's own bound
    stream.emit(_delta(0))
    stream.flush()
    assert (await _frame(stream)).deltas[0].tokens == b"\0\0\0\0"
    waiting = asyncio.create_task(_frame(stream))
    for token in (1, 2, 3):
        await sleep(0)
        ended = common_pb2.FINISH_REASON_STOP if token == 3 else common_pb2.FINISH_REASON_UNSPECIFIED
        stream.emit(_delta(token, finish_reason=ended))
        stream.flush()
    await sleep(0)
    assert slept == [MAX_INTERVAL_S]
    rest.set()
    (delta,) = (await waiting).deltas
    assert memoryview(delta.tokens).cast("I").tolist() == [1, 2, 3]
    assert delta.finish_reason == common_pb2.FINISH_REASON_STOP
    stream.close_input()
    assert await stream.next_frame() is None

"""Outbox: bounded frames, order kept, nothing lost."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.decode.frame_buffer import FrameBuffer
from slipstream.v1 import common_pb2, decode_pb2

_steps = st.lists(
    st.tuples(st.dictionaries(st.sampled_from("abc"), st.integers(1, 3), max_size=3), st.booleans()),
    max_size=40,
)


@settings(max_examples=50, deadline=None)
@given(_steps, st.integers(1, 5))
def test_each_sequence_gets_its_tokens_in_order(
    steps: list[tuple[dict[str, int], bool]], max_frames: int
) -> None:
    outbox = FrameBuffer(max_frames=max_frames)
    sent: dict[str, list[int]] = {}
    received: dict[str, list[int]] = {}
    numbers: list[int] = []

    def receive() -> None:
        frame = outbox.take()
        if frame is None:
            return
        numbers.append(frame.step)
        assert len({d.request_id for d in frame.deltas}) == len(frame.deltas)
        for delta in frame.deltas:
            received.setdefault(delta.request_id, []).extend(
                np.frombuffer(delta.tokens, dtype="<u4").tolist()
            )
            assert len(delta.logprobs) == len(delta.tokens) // 4

    count = 0
    for step, reads in steps:
        deltas = []
        for request_id, n in step.items():
            tokens = list(range(count, count + n))
            count += n
            sent.setdefault(request_id, []).extend(tokens)
            deltas.append(
                decode_pb2.SequenceDelta(
                    request_id=request_id,
                    attempt=1,
                    tokens=np.asarray(tokens, "<u4").tobytes(),
                    logprobs=[common_pb2.PositionLogprobs(logprob=-1.0)] * n,
                )
            )
        outbox.push(deltas)
        assert len(outbox) <= max_frames
        if reads:
            receive()
    while len(outbox):
        receive()
    assert received == sent
    assert numbers == list(range(1, len(numbers) + 1))


def test_the_end_survives_coalescing() -> None:
    outbox = FrameBuffer(max_frames=1)
    delta = decode_pb2.SequenceDelta
    outbox.push([delta(request_id="a", attempt=1, running=True)])
    outbox.push([delta(request_id="a", attempt=1, tokens=b"\1\0\0\0")])
    outbox.push(
        [
            delta(
                request_id="a",
                attempt=1,
                tokens=b"\2\0\0\0",
                finish_reason=common_pb2.FINISH_REASON_STOP,
                stats=decode_pb2.SequenceStats(generated_tokens=2),
            )
        ]
    )
    frame = outbox.take()
    assert frame is not None
    assert len(frame.deltas) == 1
    assert frame.deltas[0].tokens == b"\1\0\0\0\2\0\0\0"
    assert frame.deltas[0].running
    assert frame.deltas[0].finish_reason == common_pb2.FINISH_REASON_STOP
    assert frame.deltas[0].stats.generated_tokens == 2
    assert outbox.take() is None


def test_attempts_of_one_request_are_not_mixed() -> None:
    outbox = FrameBuffer(max_frames=1)
    outbox.push([decode_pb2.SequenceDelta(request_id="a", attempt=1, tokens=b"\1\0\0\0")])
    outbox.push([decode_pb2.SequenceDelta(request_id="a", attempt=2, tokens=b"\2\0\0\0")])
    frame = outbox.take()
    assert frame is not None
    assert [(d.attempt, d.tokens) for d in frame.deltas] == [(1, b"\1\0\0\0"), (2, b"\2\0\0\0")]

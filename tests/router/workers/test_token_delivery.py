"""Tokens from a decode worker's frames to the listeners of their sequences: order, rounds, bounds."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.common import service_bounds
from libs.common.block_hash import as_tokens
from services.decode.stream import DecodeStream
from services.router.event_loop_lag import EventLoopLag, LagWindow, wanted_s
from services.router.workers.decode_client import DecodeClient, frame_interval_ms
from services.router.workers.delivery.token_batcher import MAX_PAUSE_S, TokenBatcher
from services.router.workers.prompt_delta import OutgoingPrompt
from services.router.workers.remote_sequence import MAX_PARKED_TOKENS, RemoteSequence
from slipstream import errors
from slipstream.v1 import common_pb2, decode_pb2
from tests.router.support.listeners import SequenceReader

_SEQUENCES = 3
_PROMPT = OutgoingPrompt(as_tokens([1]), [], root=bytes(16), salt=b"", block_tokens=16)


class _Channel:
    """A channel without a peer: the test hands frames to the client."""

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
    stream = DecodeClient(_Channel(), instance="decode-0", batcher=TokenBatcher())  # type: ignore[arg-type]
    stream._stub = type("Stub", (), {"Decode": staticmethod(lambda metadata=(): _Call())})()
    return stream


def _never_admit(start: decode_pb2.StartSequence, emit: object) -> Any:
    raise NotImplementedError


def _attempt(index: int) -> common_pb2.Attempt:
    return common_pb2.Attempt(request_id=f"r{index}", attempt=1)


def _start(
    stream: DecodeClient, index: int, *, ticket: bytes = b"", reader: SequenceReader | None = None
) -> tuple[RemoteSequence, SequenceReader]:
    """A sequence that delivers."""
    reader = reader or SequenceReader()
    sequence = stream.start(decode_pb2.StartSequence(attempt=_attempt(index), ticket=ticket), _PROMPT, reader)
    sequence.resume()
    return sequence, reader


_tokens = st.lists(st.integers(0, 3), min_size=_SEQUENCES, max_size=_SEQUENCES)
_steps = st.lists(st.tuples(_tokens, st.booleans()), max_size=20)


@settings(max_examples=40, deadline=None)
@given(_steps)
def test_every_token_arrives_once_and_in_order(steps: list[tuple[list[int], bool]]) -> None:
    """From a worker's stream through the router's to the listener. Of each step: how many tokens each
    sequence gets, and whether the worker sends a frame."""

    async def run() -> None:
        stream, worker = _stream(), DecodeStream(_never_admit)
        sequences = [_start(stream, index) for index in range(_SEQUENCES)]
        sent: list[list[int]] = [[] for _ in sequences]
        count = 0

        def put(index: int, n: int, **fields: Any) -> None:
            nonlocal count
            tokens = list(range(count, count + n))
            count += n
            sent[index] += tokens
            packed = np.asarray(tokens, "<u4").tobytes()
            handle = sequences[index][0].handle
            worker.put(decode_pb2.SequenceDelta(handle=handle, tokens=packed, **fields))

        for step, is_sent in steps:
            for index, n in enumerate(step):
                if n:
                    put(index, n)
            if is_sent and worker.events:
                stream.dispatch(await worker.next_frame())
        for index in range(_SEQUENCES):
            put(index, 1, finish_reason=common_pb2.FINISH_REASON_LENGTH)
        stream.dispatch(await worker.next_frame())
        for index, (sequence, reader) in enumerate(sequences):
            got: list[int] = []
            while True:
                received = await reader.next()
                got += received.tokens
                if received.ended:
                    break
            assert got == sent[index]
            assert sequence.finished
            sequence.close()
        assert not stream.receivers
        await stream.close()

    asyncio.run(run())


async def test_a_busy_loop_gets_fewer_rounds_and_no_item_is_lost() -> None:
    delivery = TokenBatcher()
    seen: list[int] = []

    class Item:
        tenant = "a"

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
def test_frames_come_as_often_as_rounds_do_and_the_worker_is_seldom_asked(pauses_s: list[float]) -> None:
    last_ms = 0
    for pause_s in pauses_s:
        asked_ms = frame_interval_ms(pause_s, asked_ms=last_ms)
        assert asked_ms <= pause_s * 1e3
        assert 4 * asked_ms >= int(pause_s * 1e3)
        last_ms = asked_ms
        # A pause that grows by a quarter changes no interval that was just asked for.
        fresh_ms = frame_interval_ms(pause_s, asked_ms=0)
        assert frame_interval_ms(pause_s * 1.25, asked_ms=fresh_ms) == fresh_ms or pause_s < 4e-3


async def test_an_end_waits_for_no_round() -> None:
    stream = _stream()
    (ends, reader), (goes_on, other) = (_start(stream, index, ticket=b"t") for index in range(2))
    last = decode_pb2.SequenceDelta(handle=ends.handle, tokens=b"\2\0\0\0")
    last.finish_reason = common_pb2.FINISH_REASON_LENGTH
    stream.dispatch(_tokens_frame(ends, goes_on, token=1))
    stream.dispatch(decode_pb2.DecodeResponse(deltas=[last]))
    assert (reader.arrivals.qsize(), other.arrivals.qsize()) == (1, 0)
    arrival = await reader.next()
    assert (arrival.tokens, arrival.ended) == ([1, 2], True)
    await other.next()
    await stream.close()


async def test_the_first_token_of_a_prompt_computed_there_waits_for_no_round() -> None:
    stream = _stream()
    (alone, reader), (handed_over, other) = _start(stream, 0), _start(stream, 1, ticket=b"t")
    for sequence in (alone, handed_over):
        stream.dispatch(_tokens_frame(sequence, token=1))
    assert (reader.arrivals.qsize(), other.arrivals.qsize()) == (1, 0)
    assert (await other.next()).tokens == [1]
    await stream.close()


@pytest.mark.parametrize("ticket", [b"", b"t"])
async def test_tokens_come_with_their_log_probabilities(ticket: bytes) -> None:
    """Also the first ones of a prompt computed there, which wait for no round."""
    stream = _stream()
    sequence, reader = _start(stream, 0, ticket=ticket)
    for number in range(1, 4):
        position = common_pb2.PositionLogprobs(logprob=-number)
        tokens = np.asarray([number], "<u4").tobytes()
        delta = decode_pb2.SequenceDelta(handle=sequence.handle, tokens=tokens, logprobs=[position])
        if number == 3:
            delta.finish_reason = common_pb2.FINISH_REASON_LENGTH
        stream.dispatch(decode_pb2.DecodeResponse(deltas=[delta]))
    got: list[int] = []
    while True:
        arrival = await reader.next()
        assert arrival.rest is not None
        assert [-position.logprob for position in arrival.rest.logprobs] == arrival.tokens
        got += arrival.tokens
        if arrival.ended:
            break
    assert got == [1, 2, 3]
    await stream.close()


async def test_what_a_client_leaves_unread_is_bounded() -> None:
    stream = _stream()
    (sequence, reader), (other, read) = _start(stream, 0), _start(stream, 1)
    sequence.pause()
    for _ in range(2 * MAX_PARKED_TOKENS):
        stream.dispatch(_tokens_frame(sequence, token=1))
    stream.dispatch(_tokens_frame(other, token=2))
    assert (await read.next()).tokens == [2]
    assert reader.arrivals.empty()
    sequence.resume()
    assert len((await reader.next()).tokens) <= MAX_PARKED_TOKENS + 1
    with pytest.raises(errors.Aborted, match="unread"):
        await reader.next()
    await stream.close()


def _rows_frame(sequence: RemoteSequence, *, is_last: bool = False) -> decode_pb2.DecodeResponse:
    row = common_pb2.PositionLogprobs(logprob=-1.0, top=[common_pb2.TokenLogprob(token_id=1)] * 4)
    delta = decode_pb2.SequenceDelta(handle=sequence.handle, tokens=np.asarray([1], "<u4").tobytes())
    delta.logprobs.append(row)
    if is_last:
        delta.finish_reason = common_pb2.FINISH_REASON_LENGTH
    return decode_pb2.DecodeResponse(deltas=[delta])


async def test_log_probabilities_of_one_tenant_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_bounds, "MAX_TENANT_LATE_ROWS", 20)
    stream = _stream()
    readers, sequences = [SequenceReader() for _ in range(3)], list[RemoteSequence]()
    for index, (reader, salt) in enumerate(zip(readers, (b"a", b"a", b"b"), strict=True)):
        start = decode_pb2.StartSequence(attempt=_attempt(index), ticket=b"t", salt=salt)
        sequences.append(stream.start(start, _PROMPT, reader))  # paused
    for _ in range(2):
        for sequence in sequences:
            stream.dispatch(_rows_frame(sequence))
    assert len(stream.late_rows) == 30
    stream.dispatch(_rows_frame(sequences[0]))
    for _ in range(2):
        stream.dispatch(_rows_frame(sequences[2]))
    for sequence in sequences:
        sequence.resume()
    with pytest.raises(errors.Aborted, match="20 log probabilities of this tenant"):
        await readers[0].next()
    assert len((await readers[1].next()).tokens) == 2
    assert len((await readers[2].next()).tokens) == 4
    assert not len(stream.late_rows)
    await stream.close()


async def test_the_end_of_an_answer_comes_whatever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_bounds, "MAX_TENANT_LATE_ROWS", 4)
    stream, reader = _stream(), SequenceReader()
    sequence = stream.start(decode_pb2.StartSequence(attempt=_attempt(0), ticket=b"t"), _PROMPT, reader)
    stream.dispatch(_rows_frame(sequence, is_last=True))
    sequence.resume()
    assert (await reader.next()).ended
    sequence.close()
    assert not len(stream.late_rows)
    await stream.close()


async def test_a_new_sequence_delivers_nothing_before_it_is_resumed() -> None:
    """Its tokens may arrive before the first one, which prefill makes."""
    stream, reader = _stream(), SequenceReader()
    start = decode_pb2.StartSequence(attempt=_attempt(0), ticket=b"t")
    sequence = stream.start(start, _PROMPT, reader)
    stream.dispatch(_tokens_frame(sequence, token=1))
    stream.break_off(errors.Unavailable("gone"))
    await asyncio.sleep(0.001)
    assert reader.arrivals.empty()
    sequence.resume()
    assert (await reader.next()).tokens == [1]
    with pytest.raises(errors.Unavailable, match="gone"):
        await reader.next()


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


def test_a_loop_that_waits_for_a_core_is_busy() -> None:
    now_s, schedstat, ran_s = 0.0, "0 0 0", 0.0
    lag = EventLoopLag(lambda: now_s, wanted=lambda: wanted_s(schedstat, ran_s))
    assert lag.busy_share() == 0.0
    now_s, schedstat, ran_s = (
        10.0,
        "500000000 8500000000 1200",
        0.5,
    )  # a twentieth of a core, and the wish for nine tenths
    assert lag.busy_share() == pytest.approx(0.9)


@pytest.mark.parametrize("schedstat", ["", "0 0 0"])
def test_a_kernel_that_keeps_no_waits_leaves_the_cpu_time(schedstat: str) -> None:
    assert wanted_s(schedstat, 1.5) == 1.5


def _tokens_frame(*sequences: RemoteSequence, token: int) -> decode_pb2.DecodeResponse:
    handles = np.asarray([sequence.handle for sequence in sequences], "<u4").tobytes()
    return decode_pb2.DecodeResponse(
        packed_handles=handles, packed_tokens=np.asarray([token] * len(sequences), "<u4").tobytes()
    )


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=30))
def test_a_listener_that_pauses_and_resumes_gets_each_token_once_and_in_order(
    plan: list[tuple[bool, bool]],
) -> None:
    """Of each token: whether the listener pauses with it, and whether it may be delivered before the next."""

    async def run() -> None:
        stream, got, pauses, is_paused = _stream(), list[int](), False, False

        class Reader(SequenceReader):
            def on_tokens(self, tokens: list[int], rest: decode_pb2.SequenceDelta | None) -> None:
                assert not is_paused
                got.extend(tokens)
                if pauses:
                    pause()
                super().on_tokens(tokens, rest)

        def pause() -> None:
            nonlocal is_paused
            is_paused = True
            sequence.pause()

        reader = Reader()
        sequence, _ = _start(stream, 0, ticket=b"t", reader=reader)
        for token, (pauses_now, rests) in enumerate(plan):
            pauses = pauses_now
            stream.dispatch(_tokens_frame(sequence, token=token))
            if rests:
                await asyncio.sleep(0.001)
                if is_paused:
                    is_paused = False
                    sequence.resume()
        pauses = is_paused = False
        sequence.resume()
        last = decode_pb2.SequenceDelta(handle=sequence.handle)
        last.finish_reason = common_pb2.FINISH_REASON_LENGTH
        stream.dispatch(decode_pb2.DecodeResponse(deltas=[last]))
        while not (await reader.next()).ended:
            pass
        assert got == list(range(len(plan)))
        await stream.close()

    asyncio.run(run())


class _Broken(SequenceReader):
    def on_tokens(self, tokens: list[int], rest: decode_pb2.SequenceDelta | None) -> None:
        raise IndexError(f"no token {tokens[0]}")


async def test_a_listener_that_fails_is_notified_and_no_other_one() -> None:
    stream = _stream()
    broken, failing = _start(stream, 0, ticket=b"t", reader=_Broken())
    other, well = _start(stream, 1, ticket=b"t")
    stream.dispatch(_tokens_frame(broken, other, token=7))
    with pytest.raises(IndexError, match="no token 7"):
        await failing.next()
    assert (await well.next()).tokens == [7]
    await stream.close()


async def test_a_listener_that_fails_is_notified_also_where_the_end_comes_with_the_tokens() -> None:
    stream = _stream()
    sequence, failing = _start(stream, 0, ticket=b"t", reader=_Broken())
    stream.dispatch(_tokens_frame(sequence, token=7))
    last = decode_pb2.SequenceDelta(handle=sequence.handle, tokens=b"\2\0\0\0")
    last.finish_reason = common_pb2.FINISH_REASON_LENGTH
    stream.dispatch(decode_pb2.DecodeResponse(deltas=[last]))
    with pytest.raises(IndexError, match="no token 7"):
        await failing.next()
    await stream.close()

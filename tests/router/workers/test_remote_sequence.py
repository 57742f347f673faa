"""What a sequence passes on at once, outside the rounds of its stream."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest

from libs.common.block_hash import as_tokens
from services.router.workers.decode_client import DecodeClient
from services.router.workers.delivery.late_rows import LateRows
from services.router.workers.delivery.token_batcher import TokenBatcher
from services.router.workers.prompt_delta import OutgoingPrompt, SentPrompt
from services.router.workers.remote_sequence import (
    MAX_LOGPROBS_PIECE,
    MAX_PARKED_TOKENS,
    RemoteSequence,
    SequenceHost,
)
from slipstream import errors
from slipstream.v1 import common_pb2, decode_pb2
from tests.router.support.listeners import SequenceReader


class _Host:
    """A stream that notes what its sequence asks for."""

    def __init__(self) -> None:
        self.late_rows = LateRows()
        self.marks = 0
        self.asked: list[str] = []

    def mark(self, _item: object) -> None:
        self.marks += 1

    def abort(self, _sequence: object) -> None:
        self.asked.append("abort")

    def remove(self, _sequence: object) -> None:
        self.asked.append("remove")


def _start(listener: SequenceReader, *, is_paused: bool = False) -> tuple[RemoteSequence, _Host]:
    prompt = OutgoingPrompt(as_tokens([1]), [], root=bytes(16), salt=b"", block_tokens=16)
    host, sent = _Host(), SentPrompt(decode_pb2.StartSequence(handle=7), prompt, 0)
    sequence = RemoteSequence(cast(SequenceHost, host), cast(SentPrompt[Any], sent), listener)
    if not is_paused:
        sequence.resume()
    return sequence, host


def _delta(n_tokens: int, *, n_rows: int = 0, **fields: Any) -> decode_pb2.SequenceDelta:
    rows = [common_pb2.PositionLogprobs() for _ in range(n_rows)]
    return decode_pb2.SequenceDelta(tokens=bytes(4 * n_tokens), logprobs=rows, **fields)


_LAST = common_pb2.FINISH_REASON_LENGTH


async def test_the_start_of_a_prompt_comes_before_its_tokens_and_asks_for_no_round() -> None:
    reader = SequenceReader()
    sequence, host = _start(reader)
    delta = decode_pb2.SequenceDelta(handle=7, running=True)
    delta.prompt_start.restore_ms = 3.0
    sequence.feed(delta)
    assert reader.prompt_start is not None and reader.prompt_start.restore_ms == 3.0
    assert sequence.running and reader.arrivals.empty() and not host.marks
    other = SequenceReader()
    sequence, _ = _start(other)
    sequence.feed(decode_pb2.SequenceDelta(handle=7, running=True))  # of a prompt that came with a ticket
    assert sequence.running and other.prompt_start is None
    sequence.close()
    sequence.feed(delta)
    assert other.prompt_start is None


async def test_a_sequence_runs_from_its_first_tokens_and_is_stopped_until_its_end() -> None:
    reader = SequenceReader()
    sequence, host = _start(reader)
    assert sequence.resendable is not None
    sequence.feed_tokens([1])
    sequence.feed_tokens([2])
    assert sequence.running and sequence.resendable is None and host.marks == 1
    aborted, aborting = _start(SequenceReader())
    aborted.abort()
    assert aborted.resendable is None and aborting.asked == ["abort"]
    sequence.feed(_delta(0, finish_reason=_LAST))
    end = await reader.next()
    assert (end.tokens, end.ended) == ([1, 2], True), "an end waits for no round"
    sequence.feed(_delta(1))  # of a false worker
    assert (await reader.next()).tokens == [0]
    sequence.abort()
    sequence.fail(errors.Unavailable("the connection was lost"))
    assert sequence.finished and not host.asked and reader.arrivals.empty()


async def test_what_comes_beside_tokens_is_joined_and_asks_for_one_round() -> None:
    reader = SequenceReader()
    sequence, host = _start(reader)
    sequence.feed(_delta(0, failure=common_pb2.Failure(message="no pages")))
    assert host.marks == 1
    sequence.feed(_delta(0, prompt_logprobs=[common_pb2.PromptLogprobs()]))
    sequence.feed(_delta(2, n_rows=2))
    assert host.marks == 1 and len(host.late_rows) == 2 and reader.arrivals.empty()
    sequence.deliver()
    arrival = await reader.next()
    rest = arrival.rest
    assert rest is not None and (len(arrival.tokens), rest.tokens, len(host.late_rows)) == (2, b"", 0)
    assert (rest.failure.message, len(rest.prompt_logprobs), len(rest.logprobs)) == ("no pages", 1, 2)
    sequence.feed(_delta(1, n_rows=1))
    sequence.close()
    assert host.asked == ["remove"] and not len(host.late_rows)
    sequence.feed(_delta(1))
    sequence.deliver()
    sequence.fail(errors.Unavailable("the connection was lost"))
    assert reader.arrivals.empty()


async def test_log_probabilities_are_delivered_in_pieces_and_an_error_after_all_of_them() -> None:
    reader, n = SequenceReader(), MAX_LOGPROBS_PIECE
    sequence, host = _start(reader)
    sequence.feed(_delta(n, n_rows=n))
    sequence.deliver()
    assert len((await reader.next()).tokens) == n and host.marks == 1
    sequence.feed(_delta(2 * n + 1, n_rows=2 * n + 1, prompt_logprobs=[common_pb2.PromptLogprobs()]))
    sequence.fail(errors.Unavailable("the connection was lost"))  # delivers the first piece
    sequence.fail(errors.Unavailable("another one"))
    left = 2 * n + 1
    for piece, n_prompt_rows, marks in ((n, 1, 3), (n, 0, 4), (1, 0, 4)):
        arrival = await reader.next()
        left -= piece
        assert arrival.rest is not None and len(host.late_rows) == left
        assert [len(arrival.tokens), len(arrival.rest.logprobs)] == [piece, piece]
        assert len(arrival.rest.prompt_logprobs) == n_prompt_rows
        assert reader.arrivals.empty() == (left > 0) and host.marks == marks
        if left:
            sequence.deliver()
    with pytest.raises(errors.Unavailable, match="connection was lost"):
        await reader.next()
    sequence.feed_tokens([1])
    sequence.feed(_delta(1))
    assert reader.arrivals.empty()


async def test_a_paused_sequence_holds_tokens_up_to_a_bound_and_its_error_until_it_is_resumed() -> None:
    class Pausing(SequenceReader):
        def on_tokens(self, tokens: list[int], rest: decode_pb2.SequenceDelta | None) -> None:
            super().on_tokens(tokens, rest)
            sequence.pause()

    reader = Pausing()
    sequence, host = _start(reader, is_paused=True)
    sequence.feed(_delta(MAX_PARKED_TOKENS, n_rows=MAX_LOGPROBS_PIECE + 1))
    assert not host.asked
    sequence.feed_tokens([1])
    assert host.asked == ["abort"] and reader.arrivals.empty()
    sequence.resume()
    assert len((await reader.next()).tokens) == MAX_PARKED_TOKENS + 1, "without pieces"
    assert reader.arrivals.empty()
    sequence.resume()
    with pytest.raises(errors.Aborted):
        await reader.next()


@asynccontextmanager
async def started_sequence() -> AsyncIterator[tuple[DecodeClient, SequenceReader, RemoteSequence]]:
    """A sequence of a stream whose worker is not there: the test dispatches its frames."""
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        stream, reader = DecodeClient(channel, instance="a", batcher=TokenBatcher()), SequenceReader()
        prompt = OutgoingPrompt(as_tokens([1, 2]), [], root=bytes(16), salt=b"", block_tokens=16)
        yield stream, reader, stream.start(decode_pb2.StartSequence(ticket=b"t"), prompt, reader)
        await stream.close()


async def test_a_token_that_the_limit_has_changed_is_passed_on() -> None:
    async with started_sequence() as (stream, reader, sequence):
        changed = decode_pb2.SequenceDelta(handle=sequence.handle, tokens=b"\2\0\0\0", is_closing=True)
        stream.dispatch(decode_pb2.DecodeResponse(deltas=[changed]))
        sequence.resume()
        arrival = await reader.next()
        assert arrival.tokens == [2] and arrival.rest is not None and arrival.rest.is_closing


async def test_a_false_worker_ends_a_sequence_with_plausible_statistics_once() -> None:
    async with started_sequence() as (stream, reader, sequence):
        last = decode_pb2.SequenceDelta(handle=sequence.handle, finish_reason=common_pb2.FINISH_REASON_LENGTH)
        last.stats.drafted_steps = last.stats.proposed_drafts = last.stats.accepted_drafts = (1 << 32) - 1
        last.stats.transfer_ms = math.nan
        last.stats.cached.add(tokens=(1 << 32) - 1)
        stream.dispatch(decode_pb2.DecodeResponse(deltas=[last, last]))
        sequence.resume()
        rest = (await reader.next()).rest
        assert rest is not None
        assert (rest.stats.accepted_drafts, rest.stats.transfer_ms) == (0, 0)  # drafts without a step
        assert [item.tokens for item in rest.stats.cached] == [sequence.prompt_tokens]

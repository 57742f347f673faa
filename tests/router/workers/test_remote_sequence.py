"""What a sequence passes on at once, outside the rounds of its stream."""

from __future__ import annotations

import math
from typing import Any, cast

import grpc

from libs.common.block_hash import as_tokens
from services.router.workers.decode_client import DecodeClient
from services.router.workers.delivery.token_batcher import TokenBatcher
from services.router.workers.prompt_delta import OutgoingPrompt, SentPrompt
from services.router.workers.remote_sequence import RemoteSequence, SequenceHost
from slipstream.v1 import common_pb2, decode_pb2
from tests.router.support.listeners import SequenceReader


class _Host:
    """A stream that counts the rounds that its sequence asks for."""

    marks = 0

    def mark(self, _item: object) -> None:
        self.marks += 1


async def test_the_start_of_a_prompt_comes_before_its_tokens_and_asks_for_no_round() -> None:
    host, reader = _Host(), SequenceReader()
    prompt = OutgoingPrompt(as_tokens([1]), [], root=bytes(16), salt=b"", block_tokens=16)
    sent: SentPrompt[Any] = SentPrompt(decode_pb2.StartSequence(handle=7), prompt, 0)
    sequence = RemoteSequence(cast(SequenceHost, host), sent, reader)
    delta = decode_pb2.SequenceDelta(handle=7, running=True)
    delta.prompt_start.restore_ms = 3.0
    sequence.feed(delta)
    assert reader.prompt_start is not None and reader.prompt_start.restore_ms == 3.0
    assert sequence.running and reader.arrivals.empty() and not host.marks
    other = SequenceReader()
    sequence = RemoteSequence(cast(SequenceHost, host), sent, other)
    sequence.feed(decode_pb2.SequenceDelta(handle=7, running=True))  # of a prompt that came with a ticket
    assert sequence.running and other.prompt_start is None


async def test_a_false_worker_ends_a_sequence_with_plausible_statistics_once() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        stream, reader = DecodeClient(channel, instance="false", batcher=TokenBatcher()), SequenceReader()
        prompt = OutgoingPrompt(as_tokens([1, 2]), [], root=bytes(16), salt=b"", block_tokens=16)
        sequence = stream.start(decode_pb2.StartSequence(ticket=b"t"), prompt, reader)
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
        await stream.close()

"""The one Decode stream of this router and a decode worker, shared by all sequences that run there.

    sequence = stream.start(start_sequence, prompt, listener)  # sends `start`
    sequence.resume()                                          # the listener receives what comes
    sequence.abort()                                           # stops it; the last delta still comes

The stream opens with its first sequence and stays open. When it breaks, all its sequences fail as
Unavailable, and the next start opens a new one. Tokens that wait, for a slow client or for the next round
of a busy router (delivery/token_batcher.py), are joined.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import numpy as np

from libs.common.cluster.stream_figures import keep_plausible_delta
from libs.common.rpc.multiplexed_client import MultiplexedClient, batches
from libs.common.telemetry.tracing import trace_metadata
from services.router.workers.delivery.token_batcher import TokenBatcher
from services.router.workers.prompt_delta import OutgoingPrompt, PromptSender
from services.router.workers.remote_sequence import RemoteSequence, SequenceListener
from slipstream import errors
from slipstream.rpc.rpc_errors import from_failure
from slipstream.v1 import common_pb2, decode_pb2, decode_pb2_grpc

log = logging.getLogger(__name__)

# The shortest interval that is asked for: a frame costs its read, whatever it holds.
LEAST_INTERVAL_MS = 4

# A start, the handle of a sequence to abort, or a request that holds a frame interval.
_Command = decode_pb2.StartSequence | int | decode_pb2.DecodeRequest


class DecodeClient(MultiplexedClient[RemoteSequence, _Command]):
    """See the module's text. Lives as long as its channel."""

    def __init__(self, channel: grpc.aio.Channel, *, instance: str, batcher: TokenBatcher) -> None:
        super().__init__(instance)
        self._stub: decode_pb2_grpc.DecodeServiceAsyncStub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._batcher = batcher
        self.mark, self.late_rows = batcher.mark, batcher.late_rows  # see SequenceHost
        self._interval_ms = 0  # as the worker was asked last
        self._sender = PromptSender()

    def start(
        self, request: decode_pb2.StartSequence, prompt: OutgoingPrompt, listener: SequenceListener
    ) -> RemoteSequence:
        """Start a sequence, paused; its prompt is filled in. The listener receives every failure."""
        request.handle = self.new_handle()
        sent = self._sender.send(request, prompt)
        sequence = RemoteSequence(self, sent, listener, urgent=not request.ticket)
        self.receivers[sequence.handle] = sequence
        self.send(request)
        return sequence

    def abort(self, sequence: RemoteSequence) -> None:
        """Stop a sequence. One whose stream broke has stopped."""
        if sequence.handle in self.receivers:
            self.send(sequence.handle)

    async def abort_and_wait(self, attempt: common_pb2.Attempt, *, timeout_s: float) -> None:
        """Returns when the worker holds nothing of the sequence, or cannot be asked."""
        try:
            request = decode_pb2.AbortDecodeRequest(attempt=attempt)
            await self._stub.AbortDecode(request, timeout=timeout_s, metadata=trace_metadata())
        except grpc.aio.AioRpcError as error:
            log.info("abort of %s at %s: %s", attempt.request_id, self.peer, error.details())

    def remove(self, sequence: RemoteSequence) -> None:
        """Drop what still comes of the sequence."""
        self.receivers.pop(sequence.handle, None)

    # ---- MultiplexedClient

    def open_call(self) -> Any:
        return self._stub.Decode()

    def dispatch(self, frame: decode_pb2.DecodeResponse) -> None:
        """Feed a frame's tokens to their sequences. Those of removed sequences are dropped."""
        if frame.packed_handles:
            handles = np.frombuffer(frame.packed_handles, "<u4").tolist()
            tokens = np.frombuffer(frame.packed_tokens, "<u4").tolist()
            fresh: dict[int, list[int]] = {}  # a frame of several steps has several of each
            for handle, token in zip(handles, tokens, strict=True):
                if handle in fresh:
                    fresh[handle].append(token)
                else:
                    fresh[handle] = [token]
            for handle, of_one in fresh.items():
                sequence = self.receivers.get(handle)
                if sequence is not None:
                    sequence.feed_tokens(of_one)
        for delta in frame.deltas:
            sequence = self.receivers.get(delta.handle)
            if sequence is None:
                continue
            keep_plausible_delta(delta, prompt_tokens=sequence.prompt_tokens)
            if sequence.finished:  # a second end adds nothing to the first one's statistics
                delta.ClearField("stats")
            if delta.HasField("failure") and self._send_whole(sequence, delta.failure):
                continue
            sequence.feed(delta)
        self._keep_pace()

    async def wait_room(self) -> None:
        await self._batcher.caught_up()

    def _send_whole(self, sequence: RemoteSequence, failure: common_pb2.Failure) -> bool:
        """Whether the worker only missed the prompt's prefix, and the whole prompt was sent now."""
        sent = sequence.resendable
        if sent is None or not self._sender.send_whole(sent, from_failure(failure)):
            return False
        self.send(sent.request)
        return True

    def _keep_pace(self) -> None:
        """Ask for no more frames than there are rounds of delivery: each frame costs a read."""
        interval_ms = frame_interval_ms(self._batcher.pause_s, asked_ms=self._interval_ms)
        interval_ms = max(interval_ms, LEAST_INTERVAL_MS)
        if interval_ms != self._interval_ms and self.is_open:
            self._interval_ms = interval_ms
            self.send(decode_pb2.DecodeRequest(frame_interval_ms=interval_ms))

    def pack(self, commands: Sequence[_Command]) -> Iterator[decode_pb2.DecodeRequest]:
        for batch in batches(commands):
            request = decode_pb2.DecodeRequest()
            for command in batch:
                if isinstance(command, decode_pb2.StartSequence):
                    request.starts.add().CopyFrom(command)  # to append it takes several times as long
                elif isinstance(command, int):
                    request.aborts.append(command)
                else:
                    request.frame_interval_ms = command.frame_interval_ms
            yield request

    def fail(self, sequence: RemoteSequence, error: errors.SlipstreamError) -> None:
        sequence.fail(error)

    def on_broken(self) -> None:
        self._interval_ms = 0
        self._sender = PromptSender()


def frame_interval_ms(pause_s: float, *, asked_ms: int) -> int:
    """The interval to ask for: within the pause, and not another one for every change of it."""
    pause_ms = int(pause_s * 1e3)
    if asked_ms <= pause_ms < 4 * asked_ms:
        return asked_ms
    return pause_ms // 2 if pause_ms > 1 else pause_ms

"""The one Prefill stream of this router and a prefill worker, shared by all prompts that run there.

prefill = client.start(start, prompt, listener)   # the listener receives its events
prefill.close()                                   # before its end: the worker drops the prompt
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import grpc

from libs.common.rpc.tracing import trace_metadata
from services.router.workers.multiplexed_stream import MultiplexedStream, batches
from services.router.workers.prompt_delta import OutgoingPrompt, PromptSender, SentPrompt
from slipstream import errors
from slipstream.rpc.rpc_errors import from_failure
from slipstream.v1 import prefill_pb2, prefill_pb2_grpc

# A start, or the handle of a prompt to cancel.
_Command = prefill_pb2.StartPrefill | int


class PrefillListener(Protocol):
    """Receives the events of one prompt. All calls are synchronous, from the stream's reader."""

    def on_prefill_event(self, event: prefill_pb2.PrefillEvent) -> None:
        """The handoff, progress, or the first token, which is the last event."""

    def on_prefill_failed(self, error: errors.SlipstreamError, *, is_connection_lost: bool) -> None:
        """Nothing more comes. `is_connection_lost`: the connection failed, not this prompt."""

    def on_listener_error(self, error: Exception) -> None:
        """A call of this listener raised `error`. The other prompts of the frame go on."""


class RemotePrefill:
    """One prompt on a prefill worker, until its first token."""

    def __init__(
        self,
        client: PrefillClient,
        start: prefill_pb2.StartPrefill,
        sent: SentPrompt[prefill_pb2.StartPrefill],
        listener: PrefillListener,
    ) -> None:
        self.handle = start.handle
        self.start = start
        self.sent = sent
        self._client = client
        self._listener: PrefillListener | None = listener

    def close(self) -> None:
        """Deliver nothing any more; the worker drops the prompt if it still runs. Idempotent."""
        self._listener = None
        self._client.forget(self)

    def feed(self, event: prefill_pb2.PrefillEvent) -> None:
        """From the stream's reader."""
        if self._listener is not None:
            try:
                self._listener.on_prefill_event(event)
            except Exception as error:
                if self._listener is not None:
                    self._listener.on_listener_error(error)

    def fail(self, error: errors.SlipstreamError, *, is_connection_lost: bool) -> None:
        """From the stream's reader: nothing more comes."""
        listener, self._listener = self._listener, None
        if listener is not None:
            try:
                listener.on_prefill_failed(error, is_connection_lost=is_connection_lost)
            except Exception as raised:  # the stream's other prompts must still fail or go on
                listener.on_listener_error(raised)


class PrefillClient:
    """See the module's text. Lives as long as its channel."""

    def __init__(self, channel: grpc.aio.Channel, *, instance: str) -> None:
        self._stub: prefill_pb2_grpc.PrefillServiceAsyncStub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._stream: MultiplexedStream[_Command, prefill_pb2.PrefillResponse] = MultiplexedStream(
            instance, self
        )
        self._instance = instance
        self._prefills: dict[int, RemotePrefill] = {}
        self._last_handle = 0
        self._sender = PromptSender()

    @property
    def open_prefills(self) -> int:
        """Prompts not yet closed."""
        return len(self._prefills)

    @property
    def waiting_commands(self) -> int:
        """Not written yet."""
        return self._stream.waiting

    def start(
        self,
        start: prefill_pb2.StartPrefill,
        prompt: OutgoingPrompt,
        listener: PrefillListener,
    ) -> RemotePrefill:
        """Start a prompt; its handle, trace and tokens are filled in. The listener receives every failure."""
        start.handle = self._new_handle()
        trace = trace_metadata()
        if trace:  # filled in once: a prompt may be sent again by the reader, whose context is another one
            start.trace.update(trace)
        sent = self._sender.send(start, prompt)
        prefill = self._prefills[start.handle] = RemotePrefill(self, start, sent, listener)
        self._stream.send(start)
        return prefill

    def forget(self, prefill: RemotePrefill) -> None:
        """Drop what still comes of a prompt, and cancel it on the worker if it still runs."""
        if self._prefills.pop(prefill.handle, None) is not None and self._stream.is_open:
            self._stream.send(prefill.handle)

    def take(self, frame: prefill_pb2.PrefillResponse) -> None:
        """Feed a frame's events to their prompts. Those of forgotten prompts are dropped."""
        for event in frame.events:
            prefill = self._prefills.get(event.handle)
            if prefill is not None:
                self._feed(prefill, event)

    def _feed(self, prefill: RemotePrefill, event: prefill_pb2.PrefillEvent) -> None:
        if not event.HasField("failure"):
            if event.HasField("first_token"):
                del self._prefills[event.handle]  # its last event: nothing is left to be cancelled
            prefill.feed(event)
            return
        error = from_failure(event.failure)
        del self._prefills[event.handle]
        if self._sender.send_whole(prefill.sent, error):
            self._send_again(prefill)
            return
        if isinstance(error, errors.Aborted):  # by the worker: it shuts down, or decode released the KV
            error = errors.Unavailable(f"{self._instance} ended the prompt")
        prefill.fail(error, is_connection_lost=False)

    def _send_again(self, prefill: RemotePrefill) -> None:
        prefill.handle = prefill.start.handle = self._new_handle()
        self._prefills[prefill.handle] = prefill
        self._stream.send(prefill.start)

    async def close(self) -> None:
        """End the stream; the worker drops what still runs on it."""
        await self._stream.close()

    def open_call(self) -> Any:
        """See `StreamOwner`."""
        return self._stub.Prefill()

    def pack(self, commands: Sequence[_Command]) -> Iterator[prefill_pb2.PrefillRequest]:
        """See `StreamOwner`."""
        return _pack(commands)

    def on_stream_failed(self, error: errors.SlipstreamError) -> None:
        """See `StreamOwner`: all prompts fail."""
        prefills, self._prefills = self._prefills, {}
        self._sender = PromptSender()  # what answers there next may be another process
        for prefill in prefills.values():
            prefill.fail(error, is_connection_lost=True)

    def _new_handle(self) -> int:
        self._last_handle = self._last_handle % 0xFFFF_FFFF + 1
        while self._last_handle in self._prefills:
            self._last_handle = self._last_handle % 0xFFFF_FFFF + 1
        return self._last_handle


def _pack(commands: Sequence[_Command]) -> Iterator[prefill_pb2.PrefillRequest]:
    for batch in batches(commands, _size):
        request = prefill_pb2.PrefillRequest()
        for command in batch:
            if isinstance(command, int):
                request.cancels.append(command)
            else:
                request.starts.add().CopyFrom(command)  # to append it takes several times as long
        yield request


def _size(command: _Command) -> int:
    return 0 if isinstance(command, int) else len(command.prompt)

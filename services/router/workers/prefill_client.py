"""The one Prefill stream of this router and a prefill worker, shared by all prompts that run there.

prefill = client.start(start, prompt, listener)   # the listener receives its events
prefill.close()                                   # before its end: the worker drops the prompt
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import grpc

from libs.common.cluster.stream_figures import keep_plausible_event
from libs.common.rpc.multiplexed_client import MultiplexedClient, batches
from libs.common.telemetry.tracing import trace_metadata
from services.router.workers.prompt_delta import OutgoingPrompt, PromptSender, SentPrompt
from slipstream import errors
from slipstream.rpc.rpc_errors import from_failure
from slipstream.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc

log = logging.getLogger(__name__)


class PrefillListener(Protocol):
    """Receives the events of one prompt. All calls are synchronous, from the stream's reader."""

    def on_prefill_event(self, event: prefill_pb2.PrefillEvent) -> None:
        """The handoff, progress, rows of prompt_logprobs, or last the first token."""

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
        self._client.cancel(self)

    def feed(self, event: prefill_pb2.PrefillEvent) -> None:
        """Take a message. The stream's reader calls it."""
        listener = self._listener
        if listener is not None:
            try:
                listener.on_prefill_event(event)
            except Exception as error:  # also after the first token, with which the listener closes this
                listener.on_listener_error(error)

    def fail(self, error: errors.SlipstreamError, *, is_connection_lost: bool) -> None:
        """Fail the job. The stream's reader calls it where nothing more comes."""
        listener, self._listener = self._listener, None
        if listener is not None:
            try:
                listener.on_prefill_failed(error, is_connection_lost=is_connection_lost)
            except Exception as raised:  # the stream's other prompts must still fail or go on
                listener.on_listener_error(raised)


# A start, or the handle of a prompt to cancel.
_Command = prefill_pb2.StartPrefill | int


class PrefillClient(MultiplexedClient[RemotePrefill, _Command]):
    """See the module's text. Lives as long as its channel."""

    def __init__(self, channel: grpc.aio.Channel, *, instance: str) -> None:
        super().__init__(instance)
        self._stub: prefill_pb2_grpc.PrefillServiceAsyncStub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._sender = PromptSender()

    def start(
        self,
        start: prefill_pb2.StartPrefill,
        prompt: OutgoingPrompt,
        listener: PrefillListener,
    ) -> RemotePrefill:
        """Start a prompt; its handle, trace and tokens are filled in. The listener receives every failure."""
        start.handle = self.new_handle()
        trace = trace_metadata()
        if trace:  # filled in once: a prompt may be sent again by the reader, whose context is another one
            start.trace.update(trace)
        sent = self._sender.send(start, prompt)
        prefill = self.receivers[start.handle] = RemotePrefill(self, start, sent, listener)
        self.send(start)
        return prefill

    def cancel(self, prefill: RemotePrefill) -> None:
        """Drop what still comes of a prompt, and cancel it on the worker if it still runs."""
        if self.receivers.pop(prefill.handle, None) is not None:
            self.send(prefill.handle)

    async def abort_and_wait(self, attempt: common_pb2.Attempt, *, timeout_s: float) -> None:
        """Returns when the worker holds nothing of the prompt, or cannot be asked."""
        try:
            request = prefill_pb2.AbortPrefillRequest(attempt=attempt)
            await self._stub.AbortPrefill(request, timeout=timeout_s, metadata=trace_metadata())
        except grpc.aio.AioRpcError as error:
            log.info("abort of %s at %s: %s", attempt.request_id, self.peer, error.details())

    # ---- MultiplexedClient

    def open_call(self) -> Any:
        return self._stub.Prefill()

    def pack(self, commands: Sequence[_Command]) -> Iterator[prefill_pb2.PrefillRequest]:
        for batch in batches(commands):
            request = prefill_pb2.PrefillRequest()
            for command in batch:
                if isinstance(command, int):
                    request.cancels.append(command)
                else:
                    request.starts.add().CopyFrom(command)  # to append it takes several times as long
            yield request

    def dispatch(self, frame: prefill_pb2.PrefillResponse) -> None:
        """Feed a frame's events to their prompts. Those of cancelled prompts are dropped."""
        for event in frame.events:
            prefill = self.receivers.get(event.handle)
            if prefill is None:
                continue
            if event.HasField("failure"):
                self._on_failure(prefill, from_failure(event.failure))
                continue
            keep_plausible_event(event, prompt_tokens=len(prefill.sent.prompt))
            if event.HasField("first_token"):
                del self.receivers[event.handle]  # its last event: nothing is left to be cancelled
            prefill.feed(event)

    def fail(self, prefill: RemotePrefill, error: errors.SlipstreamError) -> None:
        prefill.fail(error, is_connection_lost=True)

    def on_broken(self) -> None:
        self._sender = PromptSender()

    def _on_failure(self, prefill: RemotePrefill, error: errors.SlipstreamError) -> None:
        del self.receivers[prefill.handle]
        if self._sender.send_whole(prefill.sent, error):
            prefill.handle = prefill.start.handle = self.new_handle()
            self.receivers[prefill.handle] = prefill
            self.send(prefill.start)
            return
        if isinstance(error, errors.Aborted):  # by the worker: it shuts down, or decode released the KV
            error = errors.Unavailable(f"{self.peer} ended the prompt")
        prefill.fail(error, is_connection_lost=False)

"""The one Prefills stream of this router and a prefill worker, shared by all prompts that run there.

    call = stream.start(start, prompt)
    response = await call.next_or_idle()      # None: nothing came for a while
    call.close()                              # before its end: the worker drops the prompt

A worker that does not offer the stream gets a call for each prompt (prefill_unary.py).
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import grpc

from libs.common.rpc.raise_once import raise_once
from libs.common.rpc.tracing import trace_metadata
from services.router.workers.idle_wait import NewsWait, Ticker
from services.router.workers.multiplexed_stream import MultiplexedStream, batches
from services.router.workers.prompt_delta import OutgoingPrompt, PromptSender, SentPrompt
from slipstream import errors
from slipstream.rpc_errors import from_failure
from slipstream.v1 import prefill_pb2, prefill_pb2_grpc

# A start, or the handle of a prompt to cancel.
_Command = prefill_pb2.PrefillStart | int


class RemotePrefill(Protocol):
    """One prompt on a prefill worker, until its first token."""

    broke: bool  # the connection did, not this prompt
    # Given the first token, after its handoff, while `next_or_idle` waits: so it need not wait for its task.
    # False: it leaves it. `first_taken`: it took it, though `next_or_idle` brings it as well.
    on_first: Callable[[prefill_pb2.FirstToken], bool] | None
    first_taken: bool

    async def next_or_idle(self) -> prefill_pb2.PrefillResponse | None:
        """The next response; None when nothing came for IDLE_S or a little more. Raises why it failed."""
        ...

    def close(self) -> None:
        """Nobody waits for it any more. Idempotent."""
        ...


class StreamedPrefill:
    """A prompt on the stream."""

    def __init__(
        self,
        stream: PrefillClient,
        start: prefill_pb2.PrefillStart,
        sent: SentPrompt[prefill_pb2.PrefillRequest],
    ) -> None:
        self.handle = start.handle
        self.start = start  # its request is `sent`'s
        self.sent = sent
        self.broke = self.first_taken = False
        self.on_first: Callable[[prefill_pb2.FirstToken], bool] | None = None
        self.news = NewsWait(stream.loop)
        self._stream = stream
        self._responses: collections.deque[prefill_pb2.PrefillResponse] = collections.deque()
        self._opened = False
        self._error: Exception | None = None

    async def next_or_idle(self) -> prefill_pb2.PrefillResponse | None:
        """See `RemotePrefill`."""
        if not self._responses and self._error is None:
            await self.news.wait()
        if self._responses:
            return self._responses.popleft()
        raise_once(self)
        return None

    def close(self) -> None:
        """See `RemotePrefill`."""
        self._stream.forget(self)

    def feed(self, response: prefill_pb2.PrefillResponse) -> None:
        """From the stream's reader, which wakes who waits after it."""
        last = self._responses[-1] if self._responses else None
        if last is not None and last.HasField("progress") and response.HasField("progress"):
            self._responses[-1] = response
        else:
            self._responses.append(response)
        if response.HasField("opened"):
            self._opened = True
        elif response.HasField("first_token"):
            self._pass_on(response.first_token)

    def _pass_on(self, first: prefill_pb2.FirstToken) -> None:
        if self.on_first is None or not self._opened or not self.news.waiting:
            return
        try:
            self.first_taken = self.on_first(first)
        except Exception as error:  # its task's to raise: others have events in this frame
            self._responses.clear()
            self._error = error

    def fail(self, error: errors.SlipstreamError, *, broke: bool) -> None:
        """Nothing more will come."""
        if self._error is None:
            self._error, self.broke = error, broke
            self.news.wake()


class PrefillClient:
    """See the module's text. Lives as long as its channel."""

    def __init__(self, channel: grpc.aio.Channel, *, instance: str) -> None:
        stub: prefill_pb2_grpc.PrefillServiceAsyncStub = prefill_pb2_grpc.PrefillServiceStub(channel)
        self._stream: MultiplexedStream[_Command, prefill_pb2.PrefillsResponse] = MultiplexedStream(
            instance, open_call=stub.Prefills, pack=_pack, take=self.take, fail=self._broke
        )
        self.loop = asyncio.get_running_loop()
        self._instance = instance
        self._calls: dict[int, StreamedPrefill] = {}
        self._last_handle = 0
        self._sender = PromptSender()
        self._ticker = Ticker(lambda: [call.news for call in self._calls.values()])

    @property
    def open_calls(self) -> int:
        """Prompts not yet closed."""
        return len(self._calls)

    @property
    def waiting_commands(self) -> int:
        """Not written yet."""
        return self._stream.waiting

    def start(
        self, start: prefill_pb2.PrefillStart, prompt: OutgoingPrompt, *, may_name: bool = False
    ) -> StreamedPrefill:
        """Start a prompt; its handle, trace and the prompt are filled in. What prevents it is told by the
        call. `may_name`: the worker knows prompts by name."""
        start.handle = self._new_handle()
        trace = trace_metadata()
        if trace:  # whoever sends it again runs in another one
            start.trace.update(trace)
        sent = self._sender.send(start.request, prompt, may_name=may_name)
        call = self._calls[start.handle] = StreamedPrefill(self, start, sent)
        self._stream.send(start)
        self._ticker.run()
        return call

    def _send_again(self, call: StreamedPrefill) -> None:
        call.handle = call.start.handle = self._new_handle()
        self._calls[call.handle] = call
        self._stream.send(call.start)

    def forget(self, call: StreamedPrefill) -> None:
        """Drop whatever still comes of a prompt, and stop it there if it is not done."""
        if self._calls.pop(call.handle, None) is not None and self._stream.is_open:
            self._stream.send(call.handle)

    def take(self, frame: prefill_pb2.PrefillsResponse) -> None:
        """Hand a frame's events to their prompts; those nobody knows any more are dropped."""
        fed: list[StreamedPrefill] = []
        try:
            for event in frame.events:
                call = self._calls.get(event.handle)
                if call is not None:
                    self._feed(call, event)
                    fed.append(call)
        finally:
            for call in fed:
                call.news.wake()

    def _feed(self, call: StreamedPrefill, event: prefill_pb2.PrefillEvent) -> None:
        if not event.HasField("failure"):
            response = event.response
            if response.HasField("first_token"):
                del self._calls[event.handle]  # its last one: nothing is left to be cancelled
            call.feed(response)
            return
        error = from_failure(event.failure)
        del self._calls[event.handle]
        if self._sender.send_whole(call.sent, error):
            self._send_again(call)
            return
        if isinstance(error, errors.Aborted):  # not by us: it shuts down, or decode let go of the KV
            error = errors.Unavailable(f"{self._instance} ended the prompt")
        call.fail(error, broke=False)

    async def close(self) -> None:
        """End the stream; the worker drops what still runs on it."""
        self._ticker.close()
        await self._stream.close()

    def _broke(self, error: errors.SlipstreamError) -> None:
        calls, self._calls = self._calls, {}
        self._sender = PromptSender()  # what answers there next may be another process, of another version
        for call in calls.values():
            call.fail(error, broke=True)

    def _new_handle(self) -> int:
        self._last_handle = self._last_handle % 0xFFFF_FFFF + 1
        while self._last_handle in self._calls:
            self._last_handle = self._last_handle % 0xFFFF_FFFF + 1
        return self._last_handle


def _pack(commands: Sequence[_Command]) -> Iterator[prefill_pb2.PrefillsRequest]:
    for batch in batches(commands, _size):
        request = prefill_pb2.PrefillsRequest()
        for command in batch:
            if isinstance(command, int):
                request.cancels.append(command)
            else:
                request.starts.add().CopyFrom(command)  # to append it takes several times as long
        yield request


def _size(command: _Command) -> int:
    return 0 if isinstance(command, int) else len(command.request.prompt)

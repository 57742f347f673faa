"""One sequence on a decode worker, from its start to its last delta; see decode_stream.py.

What comes between two looks of its reader is one `Arrival`.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from services.router.workers.idle_wait import NewsWait
from services.router.workers.prompt_delta import SentPrompt
from services.router.workers.token_batcher import PendingDelivery
from slipstream import errors
from slipstream.v1 import common_pb2, decode_pb2

# Tokens of a sequence that wait for a client that does not read: 64 KiB. Beyond it the request is aborted.
MAX_PARKED_TOKENS = 16_384

# A request's id on the workers, and the number of the attempt.
SequenceKey = tuple[str, int]


@dataclass(slots=True)
class Arrival:
    """Tokens in order; `rest` is what came beside them: log probabilities, an end, a failure."""

    tokens: list[int]
    rest: decode_pb2.SequenceDelta | None

    @property
    def ended(self) -> bool:
        """Nothing comes after it."""
        return self.rest is not None and bool(self.rest.finish_reason)


class SequenceHost(Protocol):
    """What a sequence asks of the stream it runs on."""

    loop: asyncio.AbstractEventLoop  # that both run in

    def send_abort(self, attempt: common_pb2.Attempt) -> None:
        """Stop it there."""
        ...

    def forget(self, sequence: RemoteSequence) -> None:
        """Nobody reads it any more."""
        ...

    def mark(self, item: PendingDelivery) -> None:
        """It has news; to be called once until it is delivered."""
        ...


class RemoteSequence:
    """See the module's text. `urgent`: its first token is the request's, and waits for no round."""

    def __init__(
        self, stream: SequenceHost, sent: SentPrompt[decode_pb2.StartSequence], *, urgent: bool = False
    ) -> None:
        # What may have to be sent again: None once it runs, failed or is not wanted any more.
        self.unsettled: SentPrompt[decode_pb2.StartSequence] | None = sent
        attempt = sent.request.attempt  # a part of a message keeps all of it: only read here
        self.key: SequenceKey = (attempt.request_id, attempt.attempt)
        self._epoch = attempt.epoch
        self.handle = sent.request.handle  # names it on its stream
        self.running = False  # its KV is committed there
        self.finished = False  # its last delta was received: the worker holds nothing of it
        self.news = NewsWait(stream.loop)
        # Given tokens that came alone, while `next` waits: so they need wake nobody. False: it leaves them.
        self.on_tokens: Callable[[list[int]], bool] | None = None
        self._stream = stream
        self._urgent = urgent
        self._rest: decode_pb2.SequenceDelta | None = None
        self._tokens = array("I")
        self._marked = False
        self._delivered = False
        self._error: errors.SlipstreamError | None = None
        self._not_taken: Exception | None = None  # what `on_tokens` failed of: its tokens are lost

    async def next(self) -> Arrival:
        """What came since the last call, at least something. Raises Unavailable when the stream broke,
        Aborted when too much waited to be read."""
        while True:
            arrival = await self.next_or_idle()
            if arrival is not None:
                return arrival

    async def next_or_idle(self) -> Arrival | None:
        """As `next`; None when nothing came for IDLE_S or a little more."""
        if not self._delivered:
            await self.news.wait()
            if not self._delivered:
                return None
        if self._not_taken is not None:
            raise self._not_taken
        self._delivered = self._error is not None
        if self._rest is None and not self._tokens:
            assert self._error is not None
            raise self._error
        arrival = Arrival(self._tokens.tolist(), self._rest)
        self._rest, self._tokens = None, array("I")
        return arrival

    def abort(self) -> None:
        """Tell the worker to stop. Its last delta, with the statistics, still comes. Idempotent."""
        if not self.finished:
            self.unsettled = None
            request_id, number = self.key
            attempt = common_pb2.Attempt(request_id=request_id, attempt=number, epoch=self._epoch)
            self._stream.send_abort(attempt)

    def forget(self) -> None:
        """Nobody will read it any more."""
        self.on_tokens = None
        self._stream.forget(self)

    def feed(self, delta: decode_pb2.SequenceDelta) -> None:
        """From the stream's reader."""
        if delta.running:
            self._runs()
        ends = bool(delta.finish_reason)
        self.finished = self.finished or ends
        tokens = delta.tokens
        if tokens:
            self.feed_tokens(np.frombuffer(tokens, "<u4").tolist())
        if ends or delta.logprobs or delta.HasField("failure"):
            delta.tokens = b""
            if self._rest is None:
                self._rest = delta
            else:
                self._rest.MergeFrom(delta)
            if self.finished:
                self._wake()  # nothing comes that it could be joined with
            else:
                self._mark()

    def feed_tokens(self, tokens: list[int]) -> None:
        """From the stream's reader: tokens and nothing else."""
        if self._error is not None:
            return
        if not self.running:
            self._runs()
        self._tokens.extend(tokens)
        if len(self._tokens) > MAX_PARKED_TOKENS:
            self.abort()
            self.fail(errors.Aborted(f"the client left {MAX_PARKED_TOKENS} tokens unread"))
        if not self._marked:
            self._mark()

    def fail(self, error: errors.SlipstreamError) -> None:
        """Nothing more will come."""
        if not self.finished and self._error is None:
            self.unsettled, self._error = None, error
            self._wake()

    def deliver(self) -> None:
        """From the delivery: its round has come."""
        self._marked = False
        if (self._rest is not None or self._tokens) and not self._hand_on():
            self._wake()

    def _hand_on(self) -> bool:
        """Whether the tokens went on without the reader."""
        if self.on_tokens is None or self._rest is not None or not self.news.waiting:
            return False
        try:
            taken = self.on_tokens(self._tokens.tolist())
        except Exception as error:  # the reader's to raise: others are delivered to in this round
            self._not_taken = error
            return False
        if taken:
            self._tokens = array("I")
            self.news.heard()
        return taken

    def _runs(self) -> None:
        self.running = True
        if self.unsettled is not None:
            self.unsettled.prompt.forget_packed()
            self.unsettled = None

    def _mark(self) -> None:
        if self._urgent:
            self._urgent = False
            self._wake()
        elif not self._marked:
            self._marked = True
            self._stream.mark(self)

    def _wake(self) -> None:
        self._delivered = True
        self.news.wake()

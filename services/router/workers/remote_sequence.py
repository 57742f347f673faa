"""One sequence on a decode worker, from its start to its last delta; see decode_client.py.

The stream's reader feeds the sequence, and the sequence pushes to its listener: tokens in the rounds of the
token batcher, ends and failures at once. A paused sequence joins what comes until it is resumed.
"""

from __future__ import annotations

from array import array
from typing import Protocol

import numpy as np

from services.router.workers.delivery.late_rows import LateRows, rows_of
from services.router.workers.delivery.token_batcher import PendingDelivery
from services.router.workers.prompt_delta import SentPrompt
from slipstream import errors
from slipstream.v1 import decode_pb2

# A piece of these takes a few milliseconds, and deliveries take turns piece by piece.
MAX_LOGPROBS_PIECE = 16
# Tokens of a paused sequence that may wait: 64 KiB. With more of them the request is aborted.
MAX_PARKED_TOKENS = 16_384


class SequenceListener(Protocol):
    """Receives what a sequence brings. All calls are synchronous, from the stream's reader or its batcher."""

    def on_tokens(self, tokens: list[int], rest: decode_pb2.SequenceDelta | None) -> None:
        """Tokens in order; `rest` holds what came beside them: log probabilities, an end, a failure."""

    def on_prompt_started(self, start: decode_pb2.PromptStart) -> None:
        """The worker has pages for a prompt that it computes itself, and has restored what is cached."""

    def on_sequence_failed(self, error: errors.SlipstreamError) -> None:
        """The connection failed, or too many tokens waited. Nothing more comes."""

    def on_listener_error(self, error: Exception) -> None:
        """A call of this listener raised `error`. The other sequences of the round go on."""


class SequenceHost(Protocol):
    """The interface that a sequence needs of its stream."""

    def abort(self, sequence: RemoteSequence) -> None:
        """Stop the sequence on the worker."""

    def remove(self, sequence: RemoteSequence) -> None:
        """Drop what still comes of the sequence."""

    @property
    def late_rows(self) -> LateRows:
        """The log probabilities of all sequences of the router."""

    def mark(self, item: PendingDelivery) -> None:
        """Deliver `item` in the next round. A sequence calls this once until it is delivered."""


class RemoteSequence:
    """See the module's text. `urgent`: its first token is the request's first, and waits for no round.

    A new sequence is paused: its tokens may arrive before the first token, which prefill makes.
    """

    def __init__(
        self,
        stream: SequenceHost,
        sent: SentPrompt[decode_pb2.StartSequence],
        listener: SequenceListener,
        *,
        urgent: bool = False,
    ) -> None:
        # What may have to be sent again; None once the sequence runs, failed or was aborted.
        self.resendable: SentPrompt[decode_pb2.StartSequence] | None = sent
        self.prompt_tokens = len(sent.prompt)
        self.handle = sent.request.handle  # names the sequence on its stream
        self.tenant = sent.request.salt  # see PendingDelivery
        self.running = False  # its KV is committed on the worker
        self.finished = False  # its last delta was received: the worker holds nothing of it
        self._stream = stream
        self._listener: SequenceListener | None = listener
        self._urgent = urgent
        self._is_paused = True
        self._rest: decode_pb2.SequenceDelta | None = None
        self._tokens = array("I")
        self._is_marked = False
        self._error: errors.SlipstreamError | None = None

    def pause(self) -> None:
        """Deliver nothing until `resume`."""
        self._is_paused = True

    def resume(self) -> None:
        """Deliver what waits now, and what comes from now on."""
        self._is_paused = False
        self._deliver(in_pieces=False)

    def abort(self) -> None:
        """Stop the sequence. Its last delta, with the statistics, still comes. Idempotent."""
        if not self.finished:
            self.resendable = None
            self._stream.abort(self)

    def close(self) -> None:
        """Deliver nothing any more."""
        self._listener = None
        self._drop()
        self._stream.remove(self)

    def feed(self, delta: decode_pb2.SequenceDelta) -> None:
        """Take a message. The stream's reader calls it."""
        if delta.running:
            self._set_running()
            if self._listener is not None and delta.HasField("prompt_start"):
                self._listener.on_prompt_started(delta.prompt_start)
        ends = bool(delta.finish_reason)
        self.finished = self.finished or ends
        if self._error is not None:
            return  # the listener receives the failure, not the worker's answer to the abort
        tokens = np.frombuffer(delta.tokens, "<u4").tolist()
        has_rest = ends or bool(delta.logprobs or delta.prompt_logprobs) or delta.HasField("failure")
        has_rest = has_rest or delta.is_closing
        if has_rest:  # before its tokens, which may be delivered at once
            delta.tokens = b""
            self._keep(delta)
        if tokens:
            self.feed_tokens(tokens)
        if self.finished:
            self.deliver()  # nothing comes that the end could be joined with
        elif has_rest:
            self._mark()

    def _keep(self, rest: decode_pb2.SequenceDelta) -> None:
        if self._rest is None:
            self._rest = rest
        else:
            self._rest.MergeFrom(rest)
        try:
            self._stream.late_rows.add(self.tenant, rows_of(rest))
        except errors.Aborted as error:
            if self.finished:
                return  # nothing more comes
            self.abort()
            self._drop()
            self.fail(error)

    def _drop(self) -> None:
        """Drop the tokens that wait for a round."""
        if self._rest is not None:
            self._stream.late_rows.remove(self.tenant, rows_of(self._rest))
        self._tokens, self._rest = array("I"), None

    def feed_tokens(self, tokens: list[int]) -> None:
        """Take tokens and nothing else. The stream's reader calls it."""
        if self._error is not None:
            return
        if not self.running:
            self._set_running()
        self._tokens.extend(tokens)
        if len(self._tokens) > MAX_PARKED_TOKENS:
            self.abort()
            self.fail(errors.Aborted(f"the client left {MAX_PARKED_TOKENS} tokens unread"))
        elif not self._is_marked:
            self._mark()

    def fail(self, error: errors.SlipstreamError) -> None:
        """Nothing more comes. The listener receives what waits, then `error`."""
        if not self.finished and self._error is None:
            self.resendable, self._error = None, error
            self.deliver()

    def deliver(self) -> None:
        """Push to the listener what waits, or a piece of it, unless the sequence is paused."""
        self._deliver(in_pieces=True)

    def _deliver(self, *, in_pieces: bool) -> None:
        self._is_marked = False
        if self._is_paused or self._listener is None:
            return
        try:
            if self._tokens or self._rest is not None:
                self._listener.on_tokens(*self._pop_tokens(in_pieces=in_pieces))
            # The listener may have paused or closed the sequence.
            waits = self._is_paused or self._is_marked
            if self._error is not None and self._listener is not None and not waits:
                self._listener.on_sequence_failed(self._error)
        except Exception as error:
            if self._listener is not None:
                self._listener.on_listener_error(error)

    def _pop_tokens(self, *, in_pieces: bool) -> tuple[list[int], decode_pb2.SequenceDelta | None]:
        """Take waiting tokens, or a piece of them: log probabilities cost a hundred times as much."""
        rest, piece = self._rest, MAX_LOGPROBS_PIECE
        n_rows = rows_of(rest)
        if not in_pieces or rest is None or min(len(rest.logprobs), len(self._tokens)) <= piece:
            tokens, self._tokens, self._rest = self._tokens.tolist(), array("I"), None
            if n_rows:
                self._stream.late_rows.remove(self.tenant, n_rows)
            return tokens, rest
        tokens, self._tokens = self._tokens[:piece].tolist(), self._tokens[piece:]
        first = decode_pb2.SequenceDelta(logprobs=rest.logprobs[:piece], prompt_logprobs=rest.prompt_logprobs)
        del rest.logprobs[:piece], rest.prompt_logprobs[:]
        self._stream.late_rows.remove(self.tenant, n_rows - rows_of(rest))
        self._is_marked = True
        self._stream.mark(self)
        return tokens, first

    def _set_running(self) -> None:
        self.running = True
        if self.resendable is not None:
            self.resendable.prompt.drop_packed()
            self.resendable = None

    def _mark(self) -> None:
        if self._urgent:
            self._urgent = False
            self.deliver()
        elif not self._is_marked:
            self._is_marked = True
            self._stream.mark(self)

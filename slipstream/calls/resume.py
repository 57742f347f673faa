"""Continues a stream at another router when its connection is lost. Pure.

The router's output is a function of the request: same id, same seed, same text. The SDK therefore requests
a lost stream again by its id, from a token offset, at any router. It compares the repeated output with the
output that had arrived, and drops it.

    resumption = Resumption(request, now_s=..., deadline_s=..., within_s=30)
    event = resumption.feed(event)                        # None: nothing new for the reader
    pause_s = resumption.lost(error, now_s=...)           # raises the typed error when it is final
    request = resumption.request()                        # to send after the pause
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

import grpc

from slipstream.calls.refusals import MAX_RETRIES, Refusals
from slipstream.errors import (
    Aborted,
    DataCorrupt,
    DeadlineExceeded,
    Draining,
    Overloaded,
    SlipstreamError,
    Unavailable,
)
from slipstream.replies import Event, Reply, ReplyBuilder
from slipstream.rpc.rpc_errors import from_rpc_error, status_of
from slipstream.v1 import router_pb2

ATTEMPT_HEADER = "x-slipstream-attempt"
RESUME_WITHIN_S = 30.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
# Codes of a broken connection, which come without a router's status details.
_CONNECTION_CODES = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}


@dataclass(slots=True)
class _Overlap:
    """Output after the offset: of the last stream while it runs, to be repeated by the next one."""

    text: str = ""
    reasoning: str = ""
    logprobs: int = 0
    calls: dict[int, tuple[str, str, str]] = field(default_factory=dict)  # id, name, arguments

    def add(self, delta: router_pb2.Delta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.logprobs += len(delta.logprobs)
        for piece in delta.tool_calls:
            call_id, name, arguments = self.calls.get(piece.index, ("", "", ""))
            self.calls[piece.index] = (
                call_id or piece.id,
                name or piece.name,
                arguments + piece.arguments,
            )

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.logprobs or self.calls)

    def append(self, later: _Overlap) -> None:
        """`later` follows."""
        self.text += later.text
        self.reasoning += later.reasoning
        self.logprobs += later.logprobs
        for index, pieces in later.calls.items():
            mine = self.calls.get(index, ("", "", ""))
            self.calls[index] = (mine[0] or pieces[0], mine[1] or pieces[1], mine[2] + pieces[2])

    def strip(self, delta: router_pb2.Delta) -> None:
        """Strip from `delta` what is repeated. Raises DataCorrupt when it differs."""
        delta.text, self.text = _strip(delta.text, self.text)
        delta.reasoning, self.reasoning = _strip(delta.reasoning, self.reasoning)
        repeated = min(self.logprobs, len(delta.logprobs))
        del delta.logprobs[:repeated]
        self.logprobs -= repeated
        for piece in delta.tool_calls:
            if piece.index in self.calls:
                call_id, name, arguments = self.calls[piece.index]
                piece.id, call_id = _strip(piece.id, call_id)
                piece.name, name = _strip(piece.name, name)
                piece.arguments, arguments = _strip(piece.arguments, arguments)
                self.calls[piece.index] = (call_id, name, arguments)
                if not (call_id or name or arguments):
                    del self.calls[piece.index]
        kept = [piece for piece in delta.tool_calls if piece.id or piece.name or piece.arguments]
        del delta.tool_calls[:]
        delta.tool_calls.extend(kept)


class Resumption:
    """One stream over all its connections. Times are monotonic seconds."""

    def __init__(
        self,
        request: router_pb2.GenerateRequest,
        *,
        now_s: float,
        deadline_s: float,
        within_s: float = RESUME_WITHIN_S,
        max_retries: int = MAX_RETRIES,
    ) -> None:
        """`within_s`: the time without new output after which it gives up; 0 = no resumption.

        `max_retries`: how often a request that a router refuses for lack of capacity is sent again.
        """
        if request.n > 1 or request.store:  # the contract resumes one answer only, and no stored one
            within_s = 0.0
        self.attempt = 1
        self._refusals = Refusals(0 if request.reject_if_busy else max_retries)
        self._request = request
        if within_s and not request.request_id:
            # The router's seed follows from the id, so the id must outlive the router.
            request.request_id = f"req-{secrets.token_hex(12)}"
        self._builder = ReplyBuilder()
        self._deadline_s = deadline_s
        self._within_s = within_s
        # On the current connection: all output up to `_offset` tokens has arrived, and then `_arrived`, up
        # to `_newest` tokens.
        self._offset = self._newest = request.resume_after_tokens
        self._arrived = _Overlap()
        # Output that the reader has from earlier connections, and that this one has not repeated yet.
        self._repeated = _Overlap()
        self._shown_tokens = 0
        self._echoed: set[int] = set()  # the answers whose echoed prompt the reader has
        self._prompt_rows = 0  # that the reader has
        self._prompt_rows_again = 0  # of these, how many this connection still repeats
        self._progress_s = now_s
        self._fruitless = 0
        self._new_since_loss = False
        self._was_lost = False
        self._drained: Draining | None = None  # the word of the router that had the stream last

    @property
    def reply(self) -> Reply:
        """The reply as far as it has arrived."""
        return self._builder.reply

    @property
    def metadata(self) -> Mapping[str, str]:
        """Call metadata of this attempt: the router learns from it that the client can resume elsewhere."""
        return {ATTEMPT_HEADER: str(self.attempt)} if self._within_s else {}

    def request(self) -> router_pb2.GenerateRequest:
        """The message to send for this attempt."""
        request = router_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.resume_after_tokens = self._offset
        return request

    def left_s(self, now_s: float) -> float:
        """Time until the request's deadline."""
        return max(self._deadline_s - now_s, 0.001)

    def feed(self, event: router_pb2.GenerateEvent) -> Event | None:
        """Process one event of the router. Returns the event for the reader, None when it has nothing new."""
        if event.WhichOneof("kind") != "delta":
            return self._builder.feed(event)
        delta = event.delta
        if self._request.echo and delta.text and not delta.completion_tokens:
            if delta.index in self._echoed:
                return None
            self._echoed.add(delta.index)
            self._new_since_loss = True
            return self._builder.feed(event)
        if delta.completion_tokens > self._newest:
            # In order: whatever belongs to the tokens before has come.
            self._offset, self._newest = self._newest, delta.completion_tokens
            self._arrived = _Overlap()
        self._arrived.add(delta)
        repeats = bool(self._repeated or (self._prompt_rows_again and delta.prompt_logprobs))
        self._strip_prompt_rows(delta)
        if repeats:
            self._repeated.strip(delta)
            empty = not (
                delta.text or delta.reasoning or delta.tool_calls or delta.logprobs or delta.prompt_logprobs
            )
            if empty and delta.completion_tokens <= self._shown_tokens:
                return None
        self._shown_tokens = max(self._shown_tokens, delta.completion_tokens)
        self._new_since_loss = True
        return self._builder.feed(event)

    def _strip_prompt_rows(self, delta: router_pb2.Delta) -> None:
        """Strip from `delta` the rows of the prompt that are repeated."""
        repeated = min(self._prompt_rows_again, len(delta.prompt_logprobs))
        del delta.prompt_logprobs[:repeated]
        self._prompt_rows_again -= repeated
        self._prompt_rows += len(delta.prompt_logprobs)

    def lost(self, error: grpc.RpcError, *, now_s: float, give_up: bool = False) -> float:
        """The connection is gone: how long to pause before the next attempt. Raises the typed error when
        there is none: it is the router's own word, time is up, or the caller gives up."""
        typed = from_rpc_error(error)
        has_begun = self._was_lost or self._new_since_loss
        left_s = self._deadline_s - now_s
        if not has_begun and self._refusals.pause_s(typed, left_s=left_s) is not None:
            return self._next_attempt(typed, now_s)
        if self._new_since_loss:
            self._new_since_loss, self._fruitless, self._progress_s = False, 0, now_s
            self._drained = None
        self._drained = typed if isinstance(typed, Draining) else self._drained
        out_of_time = now_s - self._progress_s >= self._within_s or now_s >= self._deadline_s
        # Another router may be full: a request that was running waits for room.
        full = isinstance(typed, Overloaded) and self._was_lost
        if give_up or out_of_time or not (full or _may_resume(error, typed)):
            raise self._final_error(error, typed, now_s=now_s) from None
        self._was_lost = True
        return self._next_attempt(typed, now_s)

    def _final_error(self, error: grpc.RpcError, typed: SlipstreamError, *, now_s: float) -> SlipstreamError:
        if now_s >= self._deadline_s and not isinstance(typed, (Aborted, DeadlineExceeded)):
            return DeadlineExceeded("the request's deadline passed")
        if self._drained is not None and type(typed) is Unavailable and status_of(error) is None:
            return Draining(
                f"{self._drained.message}, and no router goes on with the request: {typed.message}"
            )
        return typed

    def _next_attempt(self, typed: SlipstreamError, now_s: float) -> float:
        pause_s: float = min(_FIRST_PAUSE_S * 2.0**self._fruitless, _LONGEST_PAUSE_S)
        if isinstance(typed, Overloaded):
            pause_s = max(pause_s, typed.retry_after_ms / 1e3)
        self._fruitless += 1
        self.attempt += 1
        self._prompt_rows_again = self._prompt_rows
        self._arrived.append(self._repeated)
        self._arrived, self._repeated = _Overlap(), self._arrived
        self._newest = self._offset
        return min(pause_s, self.left_s(now_s))


def _strip(fresh: str, known: str) -> tuple[str, str]:
    """(what of `fresh` comes after `known`, what of `known` comes after `fresh`)."""
    common = min(len(fresh), len(known))
    if fresh[:common] != known[:common]:
        raise DataCorrupt("the resumed answer is another one: was the cluster's model changed?")
    return fresh[common:], known[common:]


def _may_resume(error: grpc.RpcError, typed: SlipstreamError) -> bool:
    """A connection that broke, or a router that drains or lacks a worker. The rest is the router's answer."""
    if isinstance(typed, Draining | Unavailable):
        return True
    return bool(error.code() in _CONNECTION_CODES and status_of(error) is None)

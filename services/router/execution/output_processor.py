"""Turns generated tokens into deltas of text, reasoning and tool calls, with token counts. Pure.

The processor makes each delta inside its event, because copying a delta into an event takes longer than
making it.

How tokens were batched into frames changes neither the answer nor its token counts. Tokens are processed
one by one where each of them may end the answer or its reasoning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from libs.text.response_parser import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ResponseParser,
    ToolCallArguments,
    ToolCallStart,
)
from libs.text.special_tokens import THINK_END, TOOL_CALL_BEGIN, TOOL_CALLS_SECTION_BEGIN
from libs.text.tokenizer import Tokenizer
from services.router.request.token_texts import write_token
from slipstream.v1 import common_pb2, router_pb2

Event = router_pb2.GenerateEvent

_REASONING_ENDS = (THINK_END, TOOL_CALLS_SECTION_BEGIN, TOOL_CALL_BEGIN)
_KINDS = {ReasoningDelta: 0, ContentDelta: 1, ToolCallStart: 2, ToolCallArguments: 2}


@dataclass(slots=True)
class _TokenOutput:
    """What one token adds to the answer. `text_offset`: where the token begins in the text."""

    token: int
    n_tokens: int  # with this one
    deltas: Sequence[Delta]
    logprobs: common_pb2.PositionLogprobs | None
    text_offset: int


class OutputProcessor:
    """The growing answer of one request, over all its attempts.

    `hidden_token_ids` are stop tokens of the client's choice, whose text is not shown. `resume_after`: the
    number of tokens whose output the client already has, and does not get again.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        parser: ResponseParser,
        *,
        forced: Sequence[int] = (),
        thinking: bool = False,
        stop_token_ids: Iterable[int] = (),
        hidden_token_ids: Iterable[int] = (),
        with_logprobs: bool = False,
        resume_after: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._in_reasoning = thinking
        self._reasoning_ends = _ids_of(_REASONING_ENDS, tokenizer) if thinking else frozenset()
        self._hidden = frozenset(hidden_token_ids)
        self._stop_token_ids = self._hidden.union(stop_token_ids) if with_logprobs else frozenset()
        self._with_logprobs = with_logprobs
        self.may_stop = parser.may_stop  # whether later tokens may complete a stop string
        self._one_by_one = with_logprobs or self.may_stop or bool(self._hidden)
        self._resume_after = resume_after
        self._pending: list[Delta] = parser.push(forced) if forced else []
        # Tokens that begin within text that is held back: only a stop string or its absence says where.
        self._held: deque[_TokenOutput] = deque()
        self.tokens: list[int] = []
        self.reasoning_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the answer."""
        return self.may_stop and self._parser.stopped

    @property
    def stop_string(self) -> str:
        """The stop string that has ended the answer; empty without one."""
        return self._parser.stop_string

    @property
    def saw_tool_calls(self) -> bool:
        """Whether the answer calls tools."""
        return self._parser.saw_tool_calls

    def push(
        self, tokens: Sequence[int], logprobs: Sequence[common_pb2.PositionLogprobs] = ()
    ) -> list[Event]:
        """Process generated tokens. Returns the client's new events, usually one delta."""
        out: list[Event] = []
        if self._may_batch(tokens):
            self.tokens += tokens
            if self._in_reasoning:
                self.reasoning_tokens += len(tokens)
            deltas = self._parser.push(tokens)
            if self._pending:
                deltas, self._pending = [*self._pending, *deltas], []
            self._add(out, deltas, len(self.tokens))
            return out
        for index, token in enumerate(tokens):
            if self.stopped:
                break
            self._count(token)
            text_offset = self._parser.text_chars if self._with_logprobs else 0
            deltas = [*self._pending, *(() if token in self._hidden else self._parser.push([token]))]
            self._pending = []
            if len(self.tokens) <= self._resume_after:
                continue
            has_row = self._with_logprobs and index < len(logprobs) and token not in self._stop_token_ids
            row = logprobs[index] if has_row else None
            self._held.append(_TokenOutput(token, len(self.tokens), deltas, row, text_offset))
            self._release(out, is_over=self.stopped)
        return out

    def _release(self, out: list[Event], *, is_over: bool) -> None:
        """Write the tokens that begin within the text that is shown, or all.

        A client that resumes after a token has all that the tokens until it add, and nothing of later ones.
        """
        shown_chars = self._parser.shown_chars
        while self._held and (is_over or self._held[0].text_offset <= shown_chars):
            held = self._held.popleft()
            self._add(out, held.deltas, held.n_tokens)
            if held.logprobs is None:
                continue
            if not out:
                out.append(Event())
            last = out[-1].delta
            row = last.logprobs.add(text_offset=min(held.text_offset, shown_chars))
            self._add_logprob(row, held.token, held.logprobs)
            # Also for text that is held back: a client that resumes here has this log probability.
            last.completion_tokens = held.n_tokens

    def _may_batch(self, tokens: Sequence[int]) -> bool:
        """Whether processing these tokens together gives the same result as one by one."""
        if self._one_by_one or len(self.tokens) < self._resume_after:
            return False
        return not self._in_reasoning or self._reasoning_ends.isdisjoint(tokens)

    def finish(self) -> list[Event]:
        """Return the events that were held back until the answer's end."""
        out: list[Event] = []
        deltas = [*self._pending, *self._parser.finish()]
        self._release(out, is_over=True)
        self._add(out, deltas, len(self.tokens))
        return out

    def _count(self, token: int) -> None:
        self.tokens.append(token)
        if self._in_reasoning:
            self.reasoning_tokens += 1
            self._in_reasoning = token not in self._reasoning_ends

    def _add(self, out: list[Event], deltas: Sequence[Delta], n_tokens: int) -> None:
        """Write deltas into messages. One message holds reasoning, then text, then tool calls, in order."""
        for delta in deltas:
            message = out[-1].delta if out else None
            if message is None or _KINDS[type(delta)] < _kind_of(message):
                event = Event()
                out.append(event)
                message = event.delta
            match delta:
                case ContentDelta():
                    message.text += delta.text
                case ReasoningDelta():
                    message.reasoning += delta.text
                case ToolCallStart(index, call_id, name):
                    message.tool_calls.add(index=index, id=call_id, name=name)
                case ToolCallArguments(index, text):
                    calls = message.tool_calls
                    if calls and calls[-1].index == index:
                        calls[-1].arguments += text
                    else:
                        calls.add(index=index, arguments=text)
            message.completion_tokens = n_tokens

    def _add_logprob(
        self, into: router_pb2.TextLogprob, token: int, position: common_pb2.PositionLogprobs
    ) -> None:
        self._write_logprob(into, token, position.logprob)
        for item in position.top:
            self._write_logprob(into.top.add(), item.token_id, item.logprob)

    def _write_logprob(self, into: router_pb2.TextLogprob, token: int, logprob: float) -> None:
        write_token(into, self._tokenizer, token)
        into.logprob = logprob


def _ids_of(names: Iterable[str], tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset([tokenizer.special_ids[name] for name in names if name in tokenizer.special_ids])


def _kind_of(message: router_pb2.Delta) -> int:
    if message.tool_calls:
        return 2
    return 1 if message.text else 0

"""Parses generated token ids into typed deltas: reasoning, content and tool calls.

Only special *ids* have a control function: text that spells a control token stays text. The result does not
depend on how the ids are split into pushes. The parser never fails: of a malformed response it returns the
unambiguous parts. Format: docs/text-format.md. Pure.
"""

from __future__ import annotations

import codecs
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from libs.text.special_tokens import (
    EOS,
    EOT,
    IM_END,
    SINGULAR_SECTION_BEGIN,
    THINK_BEGIN,
    THINK_END,
    TOOL_CALL_ARGUMENT_BEGIN,
    TOOL_CALL_BEGIN,
    TOOL_CALL_END,
    TOOL_CALLS_SECTION_BEGIN,
    TOOL_CALLS_SECTION_END,
)
from libs.text.stop_matcher import StopMatcher
from libs.text.tokenizer import Tokenizer
from libs.text.tool_call_header import ToolCallHeader, infer_name, parse_header


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the visible answer."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    """More of the reasoning."""

    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    """A tool call begins; `index` counts the calls of this response from 0."""

    index: int
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """More of the JSON arguments of call `index`, exactly as the model writes them."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments


class ToolCallForm(enum.Enum):
    """How an answer gives tool calls. TEXT: all but their control tokens is content, as for a bare prompt."""

    PARSED = "parsed"
    DROPPED = "dropped"
    TEXT = "text"


class _Mode(enum.Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    BETWEEN_CALLS = "between calls"
    HEADER = "header"
    ARGUMENTS = "arguments"


_TEXT_MODES = frozenset({_Mode.REASONING, _Mode.CONTENT})
_SECTION_BEGINS = frozenset({TOOL_CALLS_SECTION_BEGIN, SINGULAR_SECTION_BEGIN})
_SECTION_ENDS = frozenset({TOOL_CALLS_SECTION_END, IM_END, EOS, EOT})


class ResponseParser:
    """Parses one response. `thinking`: the prompt ended inside `<think>`.

    Stop strings apply to content only; neither a stop string nor the text after it is shown. The parser
    infers the name of a call with a bare number as id from `tools` (OpenAI-shaped), and drops a call without
    a name.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        thinking: bool,
        call_form: ToolCallForm = ToolCallForm.PARSED,
        stop: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._mode = _Mode.REASONING if thinking else _Mode.CONTENT
        self._call_form = call_form
        self._tools = tuple(tools)
        self._content = StopMatcher(stop, marker=SINGULAR_SECTION_BEGIN)
        self._may_stop = any(stop)
        self._reasoning = StopMatcher(marker=SINGULAR_SECTION_BEGIN)
        self._cut = b""  # the first bytes of an incomplete character
        self.shown_chars = 0  # of the reasoning and the answer
        # Text of the header, then of the arguments as long as the call has no name.
        self._collected: list[str] = []
        self._unnamed: ToolCallHeader | None = None
        self._ids: set[str] = set()
        self._calls = 0
        self._finished = False
        self._out: list[Delta] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the response."""
        return self._content.stopped

    @property
    def stop_string(self) -> str:
        """The stop string that has ended the response; empty as long as none has."""
        return self._content.matched

    @property
    def may_stop(self) -> bool:
        """Whether there are stop strings, so that `stopped` may become true in the middle of a push."""
        return self._may_stop

    @property
    def saw_tool_calls(self) -> bool:
        """Whether at least one tool call began."""
        return self._calls > 0

    @property
    def text_chars(self) -> int:
        """The shown characters, and those that are held back."""
        return self.shown_chars + self._content.held_chars + self._reasoning.held_chars

    def push(self, token_ids: Sequence[int]) -> list[Delta]:
        """Parse further ids; returns the new deltas. Raises ValueError for an unknown id."""
        plain = self._tokenizer.decode_plain(token_ids)
        if plain is not None:
            self._text(self._decode(plain))
            return self._pop_deltas()
        pending = bytearray()
        for token_id in token_ids:
            name = self._tokenizer.special_name(token_id)
            if name is None:
                pending += self._tokenizer.token_bytes(token_id)
                continue
            self._text(self._decode(bytes(pending)))
            pending.clear()
            # A control token ends an incomplete character, which is dropped.
            self._cut = b""
            self._control(name)
        self._text(self._decode(bytes(pending)))
        return self._pop_deltas()

    def finish(self) -> list[Delta]:
        """End the response; returns the text that was held back. Drops an incomplete character."""
        if not self._finished:
            self._leave()
            self._finished = True
        return self._pop_deltas()

    def _decode(self, raw: bytes) -> str:
        """The text of all whole characters so far, malformed ones as U+FFFD."""
        if self._cut:
            raw = self._cut + raw
        text, n_bytes = codecs.utf_8_decode(raw, "replace", False)
        self._cut = raw[n_bytes:]
        return text

    def _pop_deltas(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _text(self, text: str) -> None:
        if not text or self._finished:
            return
        match self._mode:
            case _Mode.CONTENT:
                self._show(self._content.feed(text))
            case _Mode.REASONING:
                self._show(self._reasoning.feed(text))
            case _Mode.HEADER:
                self._collected.append(text)
            case _Mode.ARGUMENTS:
                self._arguments(text)
            case _Mode.BETWEEN_CALLS:
                pass

    def _control(self, name: str) -> None:
        if self._finished or self.stopped:
            return
        if name == THINK_END:
            if self._mode is _Mode.REASONING:
                self._enter(_Mode.CONTENT)
        elif name == THINK_BEGIN:
            if self._mode is _Mode.CONTENT:
                self._enter(_Mode.REASONING)
        elif self._call_form is ToolCallForm.TEXT:
            return
        elif name in _SECTION_BEGINS:
            self._enter(_Mode.BETWEEN_CALLS)
        elif name == TOOL_CALL_BEGIN:
            # A call is unambiguous even outside a section and before </think>.
            self._enter(_Mode.HEADER)
            self._collected.clear()
        elif name == TOOL_CALL_ARGUMENT_BEGIN:
            if self._mode is _Mode.HEADER:
                self._begin_call()
        elif name == TOOL_CALL_END:
            if self._mode not in _TEXT_MODES:
                self._enter(_Mode.BETWEEN_CALLS)
        elif name in _SECTION_ENDS and self._mode not in _TEXT_MODES:
            self._enter(_Mode.CONTENT)

    def _enter(self, mode: _Mode) -> None:
        if mode is not self._mode or mode not in _TEXT_MODES:
            self._leave(before_call=mode is _Mode.HEADER)
            self._mode = mode

    def _leave(self, *, before_call: bool = False) -> None:
        """Complete the output of the current mode."""
        if self._mode in _TEXT_MODES:
            held = self._reasoning if self._mode is _Mode.REASONING else self._content
            self._show(held.flush_before_marker() if before_call else held.flush())
        elif self._mode is _Mode.ARGUMENTS and self._unnamed is not None:
            header, arguments = self._unnamed, "".join(self._collected)
            self._unnamed = None
            name = infer_name(self._tools, arguments)
            if name is not None:
                self._start(header, name)
                self._arguments(arguments)

    def _begin_call(self) -> None:
        if self._call_form is ToolCallForm.DROPPED:
            self._mode = _Mode.BETWEEN_CALLS  # where text is dropped
            return
        header = parse_header("".join(self._collected))
        self._collected.clear()
        self._mode = _Mode.ARGUMENTS
        if header.name is not None:
            self._start(header, header.name)
        elif len(self._tools) == 1:
            self._start(header, str(self._tools[0].get("function", {}).get("name", "")))
        else:
            # Only the complete arguments determine which of several tools is called.
            self._unnamed = header

    def _start(self, header: ToolCallHeader, name: str) -> None:
        call_id, name = header.named(name, self._ids, self._calls)
        self._ids.add(call_id)
        self._out.append(ToolCallStart(self._calls, call_id, name))
        self._calls += 1

    def _arguments(self, text: str) -> None:
        if self._unnamed is not None:
            self._collected.append(text)
            return
        index = self._calls - 1
        last = self._out[-1] if self._out else None
        if isinstance(last, ToolCallArguments) and last.index == index:
            self._out[-1] = ToolCallArguments(index, last.text + text)
        elif text:
            self._out.append(ToolCallArguments(index, text))

    def _show(self, text: str) -> None:
        if not text:
            return
        self.shown_chars += len(text)
        kind = ReasoningDelta if self._mode is _Mode.REASONING else ContentDelta
        last = self._out[-1] if self._out else None
        if isinstance(last, kind):
            text = last.text + text
            self._out.pop()
        self._out.append(kind(text))

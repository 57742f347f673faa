"""The Kimi K2.5 chat template: OpenAI-shaped messages to token ids.

The template renders a conversation as segments. A control segment is a special token, emitted as its id. A
text segment is encoded with special tokens disallowed, so no text can act as control. The segment borders are
those of generation, so re-encoding a reply gives the ids that the model generated, and finds its KV blocks.
Source: chat_template.jinja of moonshotai/Kimi-K2.5. Pure.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from libs.text.special_tokens import (
    IM_ASSISTANT,
    IM_END,
    IM_MIDDLE,
    IM_SYSTEM,
    IM_USER,
    THINK_BEGIN,
    THINK_END,
    TOOL_CALL_ARGUMENT_BEGIN,
    TOOL_CALL_BEGIN,
    TOOL_CALL_END,
    TOOL_CALLS_SECTION_BEGIN,
    TOOL_CALLS_SECTION_END,
)
from libs.text.tokenizer import Tokenizer
from libs.text.tool_declaration import tools_text
from slipstream.errors import InvalidArgument

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")


class Segment(msgspec.Struct, frozen=True, gc=False):
    """A piece of the rendered conversation: text, or (`control`) the name of one special token.

    `generated` marks the segments that the model writes, inside an assistant span.
    """

    text: str
    control: bool
    generated: bool = False


class EncodedChat(msgspec.Struct, frozen=True, gc=False):
    """Ids of a conversation. `assistant_spans` are the [start, end) of the ids that the model writes.

    A span covers one assistant message after the generation prompt, its `<|im_end|>` included. Training uses
    the spans as the loss mask.
    """

    token_ids: list[int]
    assistant_spans: list[tuple[int, int]]


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    thinking: bool = False,
    add_generation_prompt: bool = True,
) -> EncodedChat:
    """Render and encode a conversation. Raises InvalidArgument naming the field of `messages`."""
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    start: int | None = None
    segments = render_chat(messages, tools, thinking=thinking, add_generation_prompt=add_generation_prompt)
    for segment in segments:
        if segment.generated and start is None:
            start = len(ids)
        if segment.control:
            ids.append(tokenizer.special_id(segment.text))
        else:
            ids.extend(tokenizer.encode_text(segment.text))
        # Every span ends with its <|im_end|>, and spans are never adjacent.
        if segment.generated and segment.control and segment.text == IM_END:
            assert start is not None
            spans.append((start, len(ids)))
            start = None
    return EncodedChat(ids, spans)


def render_chat(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    thinking: bool = False,
    add_generation_prompt: bool = True,
    first: int = 0,
    end: int | None = None,
    kept_from: int | None = None,
) -> list[Segment]:
    """Render a conversation as segments, whose joined texts equal the output of K2.5's template.

    Messages before the `first`, and from the `end` on, are omitted and only their roles are read. `kept_from`
    is the result of `reasoning_kept_from`, if known; computing it needs all messages after the `first`.
    """
    out: list[Segment] = []
    if tools:
        out += tools_header(tools_text(tools))
    if kept_from is None:
        kept_from = reasoning_kept_from(messages, thinking=thinking, first=first)
    for index in range(first, len(messages) if end is None else end):
        message = messages[index]
        role = message.get("role")
        if role not in ROLES:
            raise InvalidArgument(f"messages[{index}].role", f"must be one of {', '.join(ROLES)}")
        if name := message.get("name"):
            _header(out, _opening(role), _string(name, f"messages[{index}].name"))
        else:
            out += _HEADERS[role]
        if role == "assistant":
            _assistant(out, message, f"messages[{index}]", keep_reasoning=index >= kept_from)
            continue
        text = message.get("content")
        if role == "tool":
            path = f"messages[{index}]"
            call_id = _string(message.get("tool_call_id"), f"{path}.tool_call_id")
            text = f"## Return of {call_id}\n{content_text(text, f'{path}.content')}"
        elif not isinstance(text, str):
            text = content_text(text, f"messages[{index}].content")
        _text(out, text)
        _control(out, IM_END)
    if add_generation_prompt:
        out += _GENERATION_PROMPTS[thinking]
    return out


def render_partial(messages: Sequence[Message], *, thinking: bool) -> list[Segment]:
    """The last message, of role assistant, without its end: the answer continues its text.

    With `thinking` its reasoning is rendered, as the model wrote it. The reasoning is over in either case.
    """
    last = len(messages) - 1
    kept_from = last if thinking else len(messages)
    return render_chat(messages, first=last, kept_from=kept_from, add_generation_prompt=False)[:-1]


def tools_header(declaration: str) -> list[Segment]:
    """The message before all others, which declares the tools; `declaration` is their `tools_text`."""
    out: list[Segment] = []
    _header(out, IM_SYSTEM, "tool_declare")
    _text(out, declaration)
    _control(out, IM_END)
    return out


def content_text(content: Any, field: str) -> str:
    """Content as one string, from a string, null ("") or a list of text parts. Raises InvalidArgument."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidArgument(field, "must be a string, null or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        path = f"{field}[{index}]"
        if not isinstance(part, Mapping):
            raise InvalidArgument(path, "must be an object")
        if part.get("type") != "text":
            raise InvalidArgument(f"{path}.type", "must be text")
        texts.append(_string(part.get("text"), f"{path}.text"))
    return "".join(texts)


def reasoning_kept_from(
    messages: Sequence[Message], *, thinking: bool, first: int = 0, keeps_all: bool = False
) -> int:
    """The index of the first message whose reasoning is rendered, at least `first`.

    The template keeps the reasoning of a running tool loop, the messages after the last answer without calls.
    Without `thinking` it keeps none. With `keeps_all` it keeps that of all answers, as K2.6's template does.
    """
    if not thinking:
        return len(messages)
    if keeps_all:
        return first
    for index in range(len(messages) - 1, first - 1, -1):
        message = messages[index]
        if message.get("role") == "assistant" and not message.get("tool_calls"):
            return index + 1
    return first


def _opening(role: str) -> str:
    if role == "user":
        return IM_USER
    return IM_ASSISTANT if role == "assistant" else IM_SYSTEM


def _string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(field, "must be a string")
    return value


def _assistant(out: list[Segment], message: Message, path: str, *, keep_reasoning: bool) -> None:
    """Render one assistant message. Its span starts after the generation prompt."""
    _control(out, THINK_BEGIN)
    if reasoning := message.get("reasoning_content"):
        reasoning = _string(reasoning, f"{path}.reasoning_content")
        if keep_reasoning:
            _text(out, reasoning, generated=True)
    _control(out, THINK_END, generated=keep_reasoning)
    text = message.get("content")
    _text(out, text if isinstance(text, str) else content_text(text, f"{path}.content"), generated=True)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, Sequence):
            raise InvalidArgument(f"{path}.tool_calls", "must be a list")
        _control(out, TOOL_CALLS_SECTION_BEGIN, generated=True)
        for index, call in enumerate(calls):
            _tool_call(out, call, f"{path}.tool_calls[{index}]")
        _control(out, TOOL_CALLS_SECTION_END, generated=True)
    _control(out, IM_END, generated=True)


def _tool_call(out: list[Segment], call: Any, path: str) -> None:
    if not isinstance(call, Mapping):
        raise InvalidArgument(path, "must be an object")
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise InvalidArgument(f"{path}.function", "must be an object")
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, Mapping)):
        raise InvalidArgument(f"{path}.function.arguments", "must be a string of JSON")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    _control(out, TOOL_CALL_BEGIN, generated=True)
    _text(out, _string(call.get("id"), f"{path}.id"), generated=True)
    _control(out, TOOL_CALL_ARGUMENT_BEGIN, generated=True)
    _text(out, arguments, generated=True)
    _control(out, TOOL_CALL_END, generated=True)


def _header(out: list[Segment], opening: str, name: str) -> None:
    _control(out, opening)
    _text(out, name)
    _control(out, IM_MIDDLE)


def _control(out: list[Segment], name: str, *, generated: bool = False) -> None:
    out.append(_control_segment(name, generated))


@functools.cache
def _control_segment(name: str, generated: bool) -> Segment:
    # Cached, because a conversation has several control segments per message.
    return Segment(name, control=True, generated=generated)


def _text(out: list[Segment], text: str, *, generated: bool = False) -> None:
    if text:
        out.append(Segment(text, control=False, generated=generated))


def _header_of(role: str) -> tuple[Segment, ...]:
    out: list[Segment] = []
    _header(out, _opening(role), role)
    return tuple(out)


def _generation_prompt(*, thinking: bool) -> tuple[Segment, ...]:
    think = (THINK_BEGIN,) if thinking else (THINK_BEGIN, THINK_END)
    return (*_HEADERS["assistant"], *[_control_segment(name, False) for name in think])


# The segments before the text of a message, by role, and those after the last message, by `thinking`.
_HEADERS: Mapping[str, tuple[Segment, ...]] = {role: _header_of(role) for role in ROLES}
_GENERATION_PROMPTS = {thinking: _generation_prompt(thinking=thinking) for thinking in (False, True)}

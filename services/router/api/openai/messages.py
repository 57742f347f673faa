"""Messages and tools of the OpenAI-shaped HTTP API, as `libs.text` renders them. Pure.

As in request.py, only shapes and types are checked here. A client echoes messages that other servers and
libraries made, so fields without a meaning here are left out and named, not refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from services.router.api.json_body import Flag, Json, NoEffect, Text, path_of, read_object
from services.router.request.types import ToolChoice
from slipstream import bounds
from slipstream.errors import InvalidArgument

Ignore = Callable[[str], None]


class _CalledFunction(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: Text = None
    arguments: Any = None


class _ToolCall(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: Text = None
    type: Text = None
    function: _CalledFunction | None = None
    index: Any = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One entry of `messages`. `reasoning` is another name of `reasoning_content`, `prefix` of `partial`."""

    role: Text = None
    content: Any = None
    name: Text = None
    tool_call_id: Text = None
    reasoning_content: Text = None
    reasoning: Text = None
    partial: Flag = None
    prefix: Flag = None
    tool_calls: list[_ToolCall] | None = None
    annotations: Any = None
    refusal: Any = None
    audio: NoEffect = None
    function_call: NoEffect = None


class _ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: Text = None


class _FunctionChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Any = None
    function: _ChosenFunction | None = None


_TOOL_FIELDS = frozenset({"type", "function"})
_FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})
_PART_FIELDS = frozenset({"type", "text"})
_ECHOED_ONLY = ("annotations", "refusal")
_PARTIAL_FLAGS = ("partial", "prefix")
# Parts of answers of other servers: text by another name, and reasoning, which is no text of the answer.
_TEXT_PARTS: Mapping[str, str] = {"text": "text", "refusal": "refusal", "output_text": "text"}
_REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})


class _AllowedChoice(msgspec.Struct, forbid_unknown_fields=True):
    mode: Any = None
    tools: list[Any] | None = None


class _AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    type: Any = None
    allowed_tools: _AllowedChoice | None = None
    # OpenAI's Responses have both at the top.
    mode: Any = None
    tools: list[Any] | None = None


def parse_messages(given: Sequence[ChatMessage], ignore: Ignore) -> Sequence[Json]:
    """The messages without fields that are null or empty lists, their content as one text."""
    bounds.MESSAGES.check(len(given))
    messages: list[dict[str, Any]] = msgspec.to_builtins(given)
    n_calls = 0
    for index, item in enumerate(given):
        if type(item.content) is not str or not messages[index].keys() <= _PLAIN_FIELDS:
            n_calls += _normalize(messages[index], item, f"messages[{index}]", ignore, n_calls=n_calls)
    return messages


def partial_field(
    given: Sequence[ChatMessage], *, continue_final_message: bool | None, add_generation_prompt: bool | None
) -> str:
    """The field that asks to continue the last message; empty: none does.

    Raises InvalidArgument for a flag of an earlier message, and for a generation prompt that does not fit.
    """
    field = "continue_final_message" if continue_final_message else ""
    for index, message in enumerate(given):
        if message.partial or message.prefix:
            field = f"messages[{index}].{'partial' if message.partial else 'prefix'}"
            if index + 1 < len(given):
                raise bounds.PARTIAL.refused(field)
    if add_generation_prompt is not None and add_generation_prompt is bool(field):
        raise bounds.GENERATION_PROMPT.refused()
    return field


_PLAIN_FIELDS = frozenset({"role", "content", "name", "tool_call_id", "reasoning_content"})


def _normalize(
    message: dict[str, Any], given: ChatMessage, path: str, ignore: Ignore, *, n_calls: int
) -> int:
    """Bring one message into the template's form; returns the number of its tool calls."""
    for name in _ECHOED_ONLY:
        if message.pop(name, None):
            ignore(f"{path}.{name}")
    for name in _PARTIAL_FLAGS:
        message.pop(name, None)
    if (reasoning := message.pop("reasoning", None)) and given.role == "assistant":
        message.setdefault("reasoning_content", reasoning)
    if given.content is not None:
        message["content"] = _content(given.content, f"{path}.content", ignore, role=given.role)
    if not message.pop("tool_calls", None):
        return 0
    calls = given.tool_calls or ()
    message["tool_calls"] = [
        _tool_call(call, f"{path}.tool_calls[{index}]", default_index=n_calls + index)
        for index, call in enumerate(calls)
    ]
    return len(calls)


def _content(content: object, path: str, ignore: Ignore, *, role: str | None) -> str:
    """Content as one text: of parts of text, without an answer's reasoning. Other parts are refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bounds.TYPE.refused(path, expected="a string or a list of parts")
    bounds.CONTENT_PARTS.check(len(content), path)
    return "".join([_part(part, f"{path}[{index}]", ignore, role=role) for index, part in enumerate(content)])


def _part(part: object, path: str, ignore: Ignore, *, role: str | None) -> str:
    if not isinstance(part, dict):
        raise bounds.TYPE.refused(path, expected="an object")
    kind = part.get("type")
    if kind is None:
        raise InvalidArgument(f"{path}.type", "must be given")
    kind = _text(kind, f"{path}.type")
    if role == "assistant" and kind in _REASONING_PARTS:
        ignore(path)
        return ""
    name = _TEXT_PARTS.get(kind)
    if name is None or (kind != "text" and role != "assistant"):
        raise InvalidArgument(f"{path}.type", "must be text: other parts are not supported")
    for field in part.keys() - _PART_FIELDS - {name}:
        ignore(path_of(path, field))
    return _text(part.get(name), f"{path}.{name}")


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise bounds.TYPE.refused(path, expected="a string")
    return value


def _tool_call(given: _ToolCall, path: str, *, default_index: int) -> Json:
    if given.type not in (None, "function"):
        raise InvalidArgument(f"{path}.type", "must be function")
    function = given.function
    if function is None:
        raise bounds.TYPE.refused(f"{path}.function", expected="an object")
    name = function.name or ""
    return {
        "id": given.id or f"functions.{name}:{default_index}",
        "type": "function",
        "function": {"name": name, "arguments": arguments_text(function.arguments)},
    }


def arguments_text(given: object) -> str:
    """The arguments as text: a model's broken JSON stays as it is, or its session could never go on."""
    if given is None or given == "":
        return "{}"
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def parse_tools(given: Sequence[Any], ignore: Ignore) -> Sequence[Json]:
    """The tools without unknown fields; `libs.text` checks everything else."""
    if len(given) > bounds.MAX_TOOLS:
        raise bounds.TOOLS.refused(count=len(given))
    return [_known_tool(tool, f"tools[{index}]", ignore) for index, tool in enumerate(given)]


def _known_tool(tool: Any, path: str, ignore: Ignore) -> Any:
    if not isinstance(tool, dict):
        return tool
    tool = _known(tool, _TOOL_FIELDS, path, ignore)
    function = tool.get("function")
    if isinstance(function, dict) and not function.keys() <= _FUNCTION_FIELDS:
        tool = {**tool, "function": _known(function, _FUNCTION_FIELDS, f"{path}.function", ignore)}
    return tool


def _known(given: Json, fields: frozenset[str], path: str, ignore: Ignore) -> Json:
    if given.keys() <= fields:
        return given
    for name in given:
        if name not in fields:
            ignore(path_of(path, name))
    return {name: value for name, value in given.items() if name in fields}


def parse_tool_choice(value: object, ignore: Ignore) -> ToolChoice | None:
    """One of three words, or the function to call."""
    if value is None:
        return None
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return ToolChoice(value)  # type: ignore[arg-type]
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        return _allowed_tools(read_object(value, _AllowedTools, ignore, "tool_choice"))
    if not isinstance(value, dict) or value.get("type") != "function":
        raise bounds.TOOL_CHOICE.refused()
    function = read_object(value, _FunctionChoice, ignore, "tool_choice").function
    return ToolChoice("function", (function and function.name) or "")


def _allowed_tools(given: _AllowedTools) -> ToolChoice:
    """Some of the declared tools, by name."""
    choice = given.allowed_tools or _AllowedChoice(given.mode, given.tools)
    if choice.mode not in ("auto", "required"):
        raise bounds.TOOL_CHOICE.refused("tool_choice.allowed_tools.mode")
    names = []
    for index, tool in enumerate(choice.tools or ()):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise bounds.TYPE.refused(
                f"tool_choice.allowed_tools.tools[{index}].function.name", expected="a string"
            )
        names.append(name)
    if not names:
        raise bounds.TOOL_CHOICE.refused("tool_choice.allowed_tools.tools")
    return ToolChoice(choice.mode, allowed=tuple(names))

"""Messages and tools of the OpenAI-shaped HTTP API, as `libs.text` renders them. Pure.

As in request.py, only shapes and types are checked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from services.router.api.json_body import Json, NoEffect, Text, check_no_effect, read_object
from services.router.request.types import ToolChoice
from slipstream import bounds
from slipstream.errors import InvalidArgument


class _CalledFunction(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: Text = None
    arguments: Text = None


class _ToolCall(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    id: Text = None
    type: Text = None
    function: _CalledFunction | None = None
    index: Any = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One entry of `messages`."""

    role: Text = None
    content: Any = None
    name: Text = None
    tool_call_id: Text = None
    reasoning_content: Text = None
    tool_calls: list[_ToolCall] | None = None
    annotations: Any = None
    refusal: NoEffect = None
    audio: NoEffect = None
    function_call: NoEffect = None

    NO_EFFECT: ClassVar[Mapping[str, tuple[object, ...]]] = {"annotations": ([],)}


class _Function(msgspec.Struct, forbid_unknown_fields=True):
    name: Any = None
    description: Any = None
    parameters: Any = None
    strict: Any = None


class _Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Any = None
    function: Any = None


class _ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: Text = None


class _FunctionChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Any = None
    function: _ChosenFunction | None = None


_TOOL_FIELDS = frozenset(_Tool.__struct_fields__)
_FUNCTION_FIELDS = frozenset(_Function.__struct_fields__)


def parse_messages(given: Sequence[ChatMessage]) -> Sequence[Json]:
    """The messages without fields that are null or empty lists, their content as one text."""
    bounds.MESSAGES.check(len(given))
    messages: list[dict[str, Any]] = msgspec.to_builtins(given)
    for index, item in enumerate(given):
        if type(item.content) is not str or item.tool_calls is not None or item.annotations is not None:
            _normalize(messages[index], item, f"messages[{index}]")
    return messages


def _normalize(message: dict[str, Any], given: ChatMessage, path: str) -> None:
    if message.pop("annotations", None) is not None:
        check_no_effect("annotations", given.annotations, given.NO_EFFECT["annotations"], path)
    if given.content is not None:
        message["content"] = _content(given.content, f"{path}.content")
    if message.pop("tool_calls", None):
        calls = enumerate(given.tool_calls or ())
        message["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{index}]") for index, call in calls]


def _content(content: object, path: str) -> str:
    """Content as one text: parts of type text are joined; others are refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bounds.TYPE.refused(path, expected="a string or a list of parts")
    bounds.CONTENT_PARTS.check(len(content), path)
    texts: list[str] = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        if not isinstance(part, dict):
            raise bounds.TYPE.refused(where, expected="an object")
        kind = part.get("type")
        if kind is None or _text(kind, f"{where}.type") != "text":
            raise InvalidArgument(f"{where}.type", "must be text: other parts are not supported")
        texts.append(_text(part.get("text"), f"{where}.text"))
    return "".join(texts)


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise bounds.TYPE.refused(path, expected="a string")
    return value


def _tool_call(given: _ToolCall, path: str) -> Json:
    if given.type not in (None, "function"):
        raise InvalidArgument(f"{path}.type", "must be function")
    function = given.function
    if function is None:
        raise bounds.TYPE.refused(f"{path}.function", expected="an object")
    return {
        "id": given.id or "",
        "type": "function",
        "function": {"name": function.name or "", "arguments": function.arguments or ""},
    }


def parse_tools(given: Sequence[Any]) -> Sequence[Json]:
    """The tools themselves. Only unknown fields are refused here; `libs.text` checks everything else."""
    if len(given) > bounds.MAX_TOOLS:
        raise bounds.TOOLS.refused(count=len(given))
    for index, tool in enumerate(given):
        if not isinstance(tool, dict):
            continue
        if not tool.keys() <= _TOOL_FIELDS:
            read_object(tool, _Tool, f"tools[{index}]")
        function = tool.get("function")
        if isinstance(function, dict) and not function.keys() <= _FUNCTION_FIELDS:
            read_object(function, _Function, f"tools[{index}].function")
    return given


def parse_tool_choice(value: object) -> ToolChoice | None:
    """One of three words, or the function to call."""
    if value is None:
        return None
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return ToolChoice(value)  # type: ignore[arg-type]
    if not isinstance(value, dict) or value.get("type") != "function":
        raise bounds.TOOL_CHOICE.refused()
    function = read_object(value, _FunctionChoice, "tool_choice").function
    return ToolChoice("function", (function and function.name) or "")

"""Messages and tools of the OpenAI-shaped HTTP API, as `libs.text` renders them. Pure.

As in request.py, only shapes and types are checked here. A client echoes messages that other servers and
libraries made, so fields without a meaning here are left out and named, not refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from services.router.api.json_body import Flag, Identifier, Ignore, Json, NoEffect, Text, path_of, read_object
from services.router.api.openai.echoed_forms import (
    PastCalls,
    calls_of_parts,
    is_json_result,
    json_text,
    reasoning_text,
)
from services.router.request.types import ToolChoice
from slipstream import bounds
from slipstream.errors import InvalidArgument


class _CalledFunctionParam(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: Text = None
    arguments: Any = None


class _CustomCall(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    name: Text = None
    input: Any = None


class _ToolCallParam(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A call. Without `function` it may have the fields of one at its top, as Workers AI's older calls."""

    id: Identifier = None
    type: Text = None
    function: _CalledFunctionParam | None = None
    index: Any = None
    custom: _CustomCall | None = None
    name: Text = None
    arguments: Any = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One entry of `messages`. `reasoning` is another name of `reasoning_content`, `prefix` of `partial`.

    `function_call` is the older form of one call, which a message of role function answers.
    """

    role: Text = None
    content: Any = None
    name: Text = None
    tool_call_id: Identifier = None
    reasoning_content: Text = None
    reasoning: Any = None
    partial: Flag = None
    prefix: Flag = None
    tool_calls: list[_ToolCallParam] | None = None
    annotations: Any = None
    refusal: Any = None
    audio: NoEffect = None
    function_call: _CalledFunctionParam | None = None


class _ChosenFunction(msgspec.Struct, forbid_unknown_fields=True):
    name: Text = None


class _FunctionChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Any = None
    function: _ChosenFunction | None = None
    name: Text = None  # at the top in OpenAI's Responses


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
    calls = PastCalls()
    for index, item in enumerate(given):
        if item.role == "user":
            calls.end_turn()
        if not _is_plain(item, messages[index]):
            _normalize(messages[index], item, f"messages[{index}]", ignore, calls)
        elif item.role == "tool":
            calls.note_answer(messages[index]["tool_call_id"])
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
_RESULT_ROLES = ("tool", "function")


def _is_plain(given: ChatMessage, message: Json) -> bool:
    """Whether the message has the template's form as it stands."""
    if type(given.content) is not str or not message.keys() <= _PLAIN_FIELDS:
        return False
    if given.role in _RESULT_ROLES:
        return given.role == "tool" and type(given.tool_call_id) is str and given.tool_call_id != ""
    return True


def _normalize(
    message: dict[str, Any], given: ChatMessage, path: str, ignore: Ignore, calls: PastCalls
) -> None:
    """Bring one message into the template's form, and note its calls."""
    for name in _ECHOED_ONLY:
        if message.pop(name, None):
            ignore(f"{path}.{name}")
    for name in _PARTIAL_FLAGS:
        message.pop(name, None)
    if (reasoning := message.pop("reasoning", None)) and given.role == "assistant":
        if text := reasoning_text(reasoning):
            message.setdefault("reasoning_content", text)
        else:
            ignore(f"{path}.reasoning")
    if given.role in _RESULT_ROLES:
        _answer_call(message, given, path, calls)
    if given.content is not None:
        message["content"] = _content(given.content, f"{path}.content", ignore, role=given.role)
    message.pop("tool_calls", None)
    message.pop("function_call", None)
    if made := _tool_calls(given, path, ignore, calls):
        message["tool_calls"] = made


def _answer_call(message: dict[str, Any], given: ChatMessage, path: str, calls: PastCalls) -> None:
    """Give a tool's result the id of its call. One without an id answers the next call, of its name."""
    call_id = given.tool_call_id
    if call_id in (None, ""):
        call_id = calls.awaited(given.name)
    if call_id is not None:
        calls.note_answer(str(call_id))
        message["tool_call_id"] = str(call_id)
    elif given.role == "function":
        raise bounds.TOOL_RESULT.refused(f"{path}.name")
    if given.role == "function":
        message["role"] = "tool"
        message.pop("name", None)  # the result's header names the call


def _tool_calls(given: ChatMessage, path: str, ignore: Ignore, calls: PastCalls) -> list[Json]:
    """The calls of a message, also those among its parts (`tool_use`) and the older `function_call`."""
    made: list[Json] = []
    bounds.TOOL_CALLS.check(len(given.tool_calls or ()), f"{path}.tool_calls")
    for index, call in enumerate(given.tool_calls or ()):
        name, arguments = _called(call, f"{path}.tool_calls[{index}]")
        made.append(_call(calls.add(call.id, name), name, arguments))
    ids = {call["id"] for call in made}
    for index, part in calls_of_parts(given.content) if given.role == "assistant" else ():
        where = f"{path}.content[{index}]"
        call_id, name = _text(part.get("id"), f"{where}.id"), _text(part.get("name"), f"{where}.name")
        if call_id in ids:
            ignore(where)  # langchain sends a call in both forms
        else:
            made.append(_call(calls.add(call_id, name), name, part.get("input")))
    if (older := given.function_call) is not None:
        if made:
            ignore(f"{path}.function_call")
        else:
            made.append(_call(calls.add(None, older.name or ""), older.name or "", older.arguments))
    return made


def _call(call_id: str, name: str, arguments: object) -> Json:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments_text(arguments)},
    }


def _content(content: object, path: str, ignore: Ignore, *, role: str | None) -> str:
    """Content as one text: of parts of text, without an answer's reasoning. Other parts are refused."""
    if isinstance(content, str):
        return content
    if role in _RESULT_ROLES and is_json_result(content):
        return json_text(content)
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
    if role == "assistant" and kind == "tool_use":
        return ""  # it becomes one of the message's calls
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


def _called(given: _ToolCallParam, path: str) -> tuple[str, object]:
    """The name and the arguments of a call."""
    if given.custom is not None:
        return given.custom.name or "", given.custom.input
    if given.type not in (None, "", "function"):
        raise InvalidArgument(f"{path}.type", "must be function")
    if given.function is None:
        return given.name or "", given.arguments
    return given.function.name or "", given.function.arguments


def arguments_text(given: object) -> str:
    """The arguments as text: a model's broken JSON stays as it is, or its session could never go on."""
    if given is None or given == "":
        return "{}"
    return given if isinstance(given, str) else json_text(given)


def parse_tools(given: Sequence[Any], ignore: Ignore) -> Sequence[Json]:
    """The tools without unknown fields; `libs.text` checks everything else."""
    return parse_each_tool(given, _known_tool, ignore)


def parse_each_tool(
    given: Sequence[Any], parse: Callable[[Any, str, Ignore], Json], ignore: Ignore
) -> Sequence[Json]:
    """The tools, each by `parse`, which gets its path. Raises InvalidArgument for too many."""
    if len(given) > bounds.MAX_TOOLS:
        raise bounds.TOOLS.refused(count=len(given))
    return [parse(tool, f"tools[{index}]", ignore) for index, tool in enumerate(given)]


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
    choice = read_object(value, _FunctionChoice, ignore, "tool_choice")
    return ToolChoice("function", (choice.function and choice.function.name) or choice.name or "")


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

"""Messages and tools of the OpenAI-shaped HTTP API, as `libs.text` renders them. Pure.

As in openai_request.py, only shapes and types are judged here.
"""

from __future__ import annotations

from services.router.api.json_fields import (
    ANY,
    ARRAY,
    OBJECT,
    TEXT,
    Json,
    NoEffect,
    Shape,
    check_kind,
    nested,
    typed,
)
from services.router.request.types import ToolChoice
from slipstream import bounds
from slipstream.errors import InvalidArgument

_MESSAGE: Shape = {
    **dict.fromkeys(("role", "name", "tool_call_id", "reasoning_content"), TEXT),
    "content": ANY,
    "tool_calls": ARRAY,
}
_TOOL_CALL: Shape = {"id": TEXT, "type": TEXT, "function": OBJECT, "index": ANY}
_CALLED: Shape = {"name": TEXT, "arguments": TEXT}
_TOOL: Shape = {"type": ANY, "function": ANY}
_FUNCTION: Shape = {"name": ANY, "description": ANY, "parameters": ANY, "strict": ANY}
_CHOSEN: Shape = {"name": TEXT}
_MESSAGE_NO_EFFECT: NoEffect = {
    **{name: () for name in ("refusal", "audio", "function_call")},
    "annotations": ([],),
}


def is_plain(item: object) -> bool:
    """A role and a text and nothing else, as most messages of a long conversation are."""
    return (
        type(item) is dict
        and len(item) == 2
        and type(item.get("role")) is str
        and type(item.get("content")) is str
    )


def parse_message(item: object, path: str) -> Json:
    """A message with what it says and nothing that it leaves empty."""
    given = typed(item, _MESSAGE, no_effect=_MESSAGE_NO_EFFECT, path=path)
    message = {"role": given.get("role"), "content": _content(given.get("content"), f"{path}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        message[name] = given.get(name)
    calls = given.get("tool_calls") or ()
    message["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return {name: value for name, value in message.items() if value not in (None, [])}


def _content(content: object, path: str) -> str | None:
    """Content as one text: parts of type text are joined; others are refused."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bounds.TYPE.refused(path, expected="a string or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        where = f"{path}[{index}]"
        if not isinstance(part, dict):
            raise bounds.TYPE.refused(where, expected="an object")
        check_kind(part.get("type"), TEXT, f"{where}.type")
        if part.get("type") != "text":
            raise InvalidArgument(f"{where}.type", "must be text: other parts are not supported")
        check_kind(part.get("text"), TEXT, f"{where}.text")
        texts.append(part.get("text") or "")
    return "".join(texts)


def _tool_call(item: object, path: str) -> Json:
    given = typed(item, _TOOL_CALL, path=path)
    if given.get("type") not in (None, "function"):
        raise InvalidArgument(f"{path}.type", "must be function")
    function = nested(given, "function", _CALLED, path=path)
    if function is None:
        raise bounds.TYPE.refused(f"{path}.function", expected="an object")
    return {
        "id": given.get("id") or "",
        "type": "function",
        "function": {"name": function.get("name") or "", "arguments": function.get("arguments") or ""},
    }


def parse_tool(item: object, path: str) -> Json:
    """Unknown keys are refused here; everything else about tools is judged by libs.text."""
    if isinstance(item, dict):
        typed(item, _TOOL, path=path)
        if isinstance(item.get("function"), dict):
            nested(item, "function", _FUNCTION, path=path)
    checked: Json = item  # type: ignore[assignment]
    return checked


def parse_tool_choice(value: object) -> ToolChoice | None:
    """One of three words, or the function to call."""
    if value is None:
        return None
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return ToolChoice(value)  # type: ignore[arg-type]
    if not isinstance(value, dict) or value.get("type") != "function":
        raise bounds.TOOL_CHOICE.refused()
    given = typed(value, _TOOL, path="tool_choice")
    function = nested(given, "function", _CHOSEN, path="tool_choice")
    return ToolChoice("function", (function or {}).get("name") or "")

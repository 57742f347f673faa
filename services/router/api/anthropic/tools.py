"""Tools of Anthropic's API as the chat template's, and which of them an answer calls. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from libs.common import api_bounds
from services.router.api.json_body import Flag, Ignore, Json, Text, path_of, read_object
from services.router.api.openai.messages import parse_each_tool
from services.router.request.types import ToolChoice
from slipstream import bounds
from slipstream.bound import shown_name

_FIELDS = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})
_MODES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none", "tool": "function"}


class ToolChoiceParam(msgspec.Struct, forbid_unknown_fields=True):
    """The field `tool_choice`."""

    type: Text = None
    name: Text = None
    disable_parallel_tool_use: Flag = None


def parse_tools(given: Sequence[Any], ignore: Ignore) -> Sequence[Json]:
    """The client's tools; `libs.text` checks what they hold. Raises InvalidArgument for tools of a server."""
    return parse_each_tool(given, _tool, ignore)


def _tool(given: Any, path: str, ignore: Ignore) -> Json:
    if not isinstance(given, dict):
        raise bounds.TYPE.refused(path, expected="an object")
    kind = given.get("type")
    if kind not in (None, "custom"):
        raise api_bounds.SERVER_TOOL.refused(f"{path}.type", kind=shown_name(str(kind)))
    for name in given.keys() - _FIELDS:
        ignore(path_of(path, name))
    function: dict[str, Any] = {"name": given.get("name")}
    if given.get("description") is not None:
        function["description"] = given["description"]
    function["parameters"] = given.get("input_schema", {"type": "object", "properties": {}})
    if given.get("strict") is not None:
        function["strict"] = given["strict"]
    return {"type": "function", "function": function}


def parse_tool_choice(given: Any, ignore: Ignore) -> tuple[ToolChoice | None, bool]:
    """Which tools an answer calls, and whether it may make several calls."""
    if given is None:
        return None, True
    choice = read_object(given, ToolChoiceParam, ignore, "tool_choice")
    mode = _MODES.get(choice.type or "")
    if mode is None:
        raise api_bounds.MESSAGES_CHOICE.refused()
    function = (choice.name or "") if mode == "function" else ""
    return ToolChoice(mode, function), choice.disable_parallel_tool_use is not True  # type: ignore[arg-type]

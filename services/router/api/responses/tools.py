"""Function tools of the Responses API as the chat template's, and which of them an answer calls. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from libs.common import api_bounds
from services.router.api.json_body import Ignore, Json, path_of
from services.router.api.openai.messages import parse_each_tool, parse_tool_choice
from services.router.request.types import ToolChoice
from slipstream import bounds
from slipstream.bound import shown_name

_FUNCTION = ("name", "description", "parameters", "strict")
_FIELDS = frozenset({"type", *_FUNCTION})


def parse_response_tools(given: Sequence[Any], ignore: Ignore) -> Sequence[Json]:
    """The client's tools; `libs.text` checks what they hold. Raises InvalidArgument for hosted tools."""
    return parse_each_tool(given, _tool, ignore)


def _tool(given: Any, path: str, ignore: Ignore) -> Json:
    if not isinstance(given, dict):
        raise bounds.TYPE.refused(path, expected="an object")
    if given.get("type") != "function":
        raise api_bounds.HOSTED_TOOL.refused(f"{path}.type", kind=shown_name(str(given.get("type"))))
    for name in given.keys() - _FIELDS:
        if given[name] is not None:
            ignore(path_of(path, name))
    function = {name: given[name] for name in _FUNCTION if given.get(name) is not None}
    return {"type": "function", "function": {"name": None, **function}}


def parse_response_choice(given: Any, ignore: Ignore) -> ToolChoice | None:
    """One of three words, the function to call, or the functions that may be called."""
    if isinstance(given, dict) and given.get("type") == "function":
        for name in given.keys() - {"type", "name"}:
            ignore(path_of("tool_choice", name))
        if not isinstance(given.get("name"), str):
            raise bounds.TYPE.refused("tool_choice.name", expected="a string")
        return ToolChoice("function", given["name"])
    if (
        given is None
        or isinstance(given, str)
        or (isinstance(given, dict) and given.get("type") == "allowed_tools")
    ):
        return parse_tool_choice(given, ignore)
    raise api_bounds.RESPONSES_CHOICE.refused()

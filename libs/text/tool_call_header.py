"""Parses the header of a tool call, its id and name, between `<|tool_call_begin|>` and the arguments. Pure.

Kimi writes `functions.{name}:{idx}`. Models also write `{name}:{idx}`, or only the number. In that case the
name is inferred from the declared tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_NAMED = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+)(?::(?P<index>\d+))?")
_BARE = re.compile(r"(?:functions\.)?:?(?P<index>\d*)")

_MAX_DIGITS = 9  # far above any number of calls; int() refuses a few thousand


class ToolCallHeader(msgspec.Struct, frozen=True, gc=False):
    """A call's `id` as written, "" if it has to be made from the name, and `name`, None if not written."""

    id: str
    name: str | None
    index: int | None

    def named(self, name: str, used: set[str], position: int) -> tuple[str, str]:
        """The call's (id, name), with an id that is not in `used`. `position` is the default index."""
        call_id = self.id
        index = position if self.index is None else self.index
        while not call_id or call_id in used:
            call_id = f"functions.{name}:{index}"
            index += 1
        return call_id, name


def parse_header(text: str) -> ToolCallHeader:
    """Parse a header. Never fails: text of an unknown form is the name itself."""
    text = text.strip()
    if bare := _BARE.fullmatch(text):
        return ToolCallHeader("", None, _index(bare["index"]))
    named = _NAMED.fullmatch(text)
    if named is None:
        return ToolCallHeader(text, text.removeprefix("functions."), None)
    if named["index"] is None:
        return ToolCallHeader("", named["name"], None)
    return ToolCallHeader(text, named["name"], _index(named["index"]))


def _index(digits: str) -> int | None:
    """The number of a call; None if none is written, or one that no call has."""
    return int(digits) if 0 < len(digits) <= _MAX_DIGITS else None


def infer_name(tools: Sequence[Mapping[str, Any]], arguments: str) -> str | None:
    """The declared tool whose parameters fit the arguments best; None if none fits."""
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    best: tuple[int, str] | None = None
    for tool in tools:
        function = tool.get("function") or {}
        properties, required = _fields_of(function.get("parameters"))
        if required <= given.keys() <= properties and (best is None or len(required) > best[0]):
            best = (len(required), str(function.get("name", "")))
    return best[1] if best else None


def _fields_of(parameters: Any) -> tuple[set[str], set[str]]:
    """The names of all fields and of the required ones. A schema of another shape has none."""
    if not isinstance(parameters, Mapping):
        return set(), set()
    properties, required = parameters.get("properties"), parameters.get("required")
    return (
        set(properties) if isinstance(properties, Mapping) else set(),
        {name for name in required if isinstance(name, str)} if isinstance(required, list) else set(),
    )

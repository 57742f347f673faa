"""Checks the tool definitions of a request. Pure; a check costs time in proportion to the tools' bytes.

A tool's schema is text for the model: nothing here enforces it. It is therefore checked as JSON within bounds
and not as a schema of some draft. No pattern is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from libs.text.digest_cache import DigestCache, digest_of
from libs.text.json_structure import value_levels
from slipstream import bounds
from slipstream.errors import InvalidArgument

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
# Function names of valid tools. Agents send the same tools with every turn.
_known_names: DigestCache[tuple[str, ...]] = DigestCache(max_bytes=4 << 20)
_ENTRY_BYTES = 300  # objects around the names
_NAME_BYTES = 192  # at most 128 ASCII characters and their object


def validate_tools(tools: object, *, field: str = "tools") -> tuple[str, ...]:
    """Check OpenAI-shaped tool definitions against the table of bounds; returns the function names in order.

    Raises InvalidArgument with the path of the defect, e.g. `tools[0].function.parameters.type`.
    """
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise InvalidArgument(field, "must be a list")
    if len(tools) > bounds.MAX_TOOLS:
        raise bounds.TOOLS.refused(field, count=len(tools))
    digest = digest_of(tools)
    known = _known_names.get(digest)
    if known is not None:
        return known
    names: list[str] = []
    n_values = n_bytes = 0
    for index, tool in enumerate(tools):
        path = f"{field}[{index}]"
        n_values += _count_values(tool, path, left=bounds.TOOL_VALUES.high - n_values)
        bounds.TOOL_VALUES.check(n_values, field)
        n_bytes += _check_size(tool, path)
        bounds.TOOLS_BYTES.check(n_bytes, field)
        name = _validate_tool(tool, path)
        if name in names:
            raise bounds.TOOL_TWICE.refused(f"{path}.function.name", name=name)
        names.append(name)
    found = tuple(names)
    _known_names.keep(digest, found, n_bytes=_ENTRY_BYTES + _NAME_BYTES * len(found))
    return found


def _validate_tool(tool: object, path: str) -> str:
    if not isinstance(tool, Mapping):
        raise InvalidArgument(path, "must be an object")
    if tool.get("type") != "function":
        raise InvalidArgument(f"{path}.type", "must be function")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise InvalidArgument(f"{path}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bounds.TOOL_NAME.refused(f"{path}.function.name")
    if not isinstance(function.get("description", ""), (str, type(None))):
        raise InvalidArgument(f"{path}.function.description", "must be a string")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, (Mapping, bool)):
        raise bounds.TOOL_JSON.refused(f"{path}.function.parameters")
    return name


def _count_values(value: object, path: str, *, left: int) -> int:
    """The number of JSON values, counted until more than `left`. Refuses deep nesting, as json recurses."""
    count = 0
    for depth, level in enumerate(value_levels(value)):
        if depth > bounds.MAX_SCHEMA_DEPTH:
            raise bounds.TOOL_DEPTH.refused(path)
        count += len(level)
        if count > left:
            break
    return count


def _check_size(tool: object, path: str) -> int:
    try:
        n_bytes = len(json.dumps(tool, ensure_ascii=False).encode("utf-8", "replace"))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(path, "is not JSON") from error
    if n_bytes > bounds.MAX_TOOL_BYTES:
        raise bounds.TOOL_BYTES.refused(path, count=n_bytes)
    return n_bytes

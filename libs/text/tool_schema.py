"""Validates the tool definitions of a request. It resolves no references and does no I/O. Pure."""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from libs.text.digest_cache import DigestCache, digest_of
from slipstream import bounds
from slipstream.errors import InvalidArgument

NAME_PATTERN = r"[a-zA-Z0-9_-]{1,64}"

_NAME = re.compile(NAME_PATTERN)
# Digests of valid schemas. Agents send the same tools with every turn, and checking a schema of six
# parameters takes about 2 ms.
_known_good: OrderedDict[bytes, None] = OrderedDict()
_MAX_KNOWN = 16_384
# Function names of valid tools, cached for all tools of a request together.
_known_names: DigestCache[tuple[str, ...]] = DigestCache(max_bytes=4 << 20)
_ENTRY_BYTES = 300  # objects around the names
_NAME_BYTES = 128  # at most 64 ASCII characters and their object


def validate_tools(tools: object, *, field: str = "tools") -> tuple[str, ...]:
    """Check OpenAI-shaped tool definitions against the table of bounds; returns the function names in order.

    Raises InvalidArgument with the path of the defect, e.g.
    `tools[0].function.parameters.properties.city.type`.
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
    for index, tool in enumerate(tools):
        path = f"{field}[{index}]"
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
    _check_size(tool, path)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise bounds.TOOL_NAME.refused(f"{path}.function.name")
    if not isinstance(function.get("description", ""), (str, type(None))):
        raise InvalidArgument(f"{path}.function.description", "must be a string")
    parameters = function.get("parameters")
    if parameters is not None:
        _check_parameters(parameters, f"{path}.function.parameters")
    return name


def _check_size(tool: Mapping[str, Any], path: str) -> None:
    # The depth is checked first, because json and jsonschema recurse.
    if _deeper_than(tool, bounds.MAX_SCHEMA_DEPTH):
        raise bounds.TOOL_DEPTH.refused(path)
    try:
        size_bytes = len(json.dumps(tool, ensure_ascii=False).encode("utf-8", "replace"))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(path, "is not JSON") from error
    if size_bytes > bounds.MAX_TOOL_BYTES:
        raise bounds.TOOL_BYTES.refused(path, count=size_bytes)


def _deeper_than(value: object, max_depth: int) -> bool:
    level: list[object] = [value]
    for _ in range(max_depth + 1):
        deeper: list[object] = []
        for item in level:
            if isinstance(item, Mapping):
                deeper.extend(item.values())
            elif isinstance(item, (list, tuple)):
                deeper.extend(item)
        if not deeper:
            return False
        level = deeper
    return True


def _check_parameters(parameters: object, path: str) -> None:
    if not isinstance(parameters, Mapping):
        raise bounds.TOOL_JSON.refused(path)
    if parameters and parameters.get("type") != "object":
        raise InvalidArgument(f"{path}.type", "must be object")
    digest = hashlib.blake2b(json.dumps(parameters).encode(), digest_size=16).digest()
    if digest in _known_good:
        _known_good.move_to_end(digest)
        return
    try:
        Draft202012Validator.check_schema(dict(parameters))
    except SchemaError as error:
        where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in error.absolute_path)
        raise bounds.TOOL_SCHEMA.refused(path + where, reason=error.message) from error
    _known_good[digest] = None
    while len(_known_good) > _MAX_KNOWN:
        _known_good.popitem(last=False)

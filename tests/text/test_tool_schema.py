"""Validation of tool definitions: each error holds the path of the defect."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from libs.text.tool_declaration import tools_text
from libs.text.tool_schema import validate_tools
from slipstream.errors import InvalidArgument
from tests.text.corpus import WEATHER_TOOL


def _tool(name: Any = "f", **function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **function}}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def _values(name: str, count: int) -> dict[str, Any]:
    return _tool(name, parameters={"type": "object", "enum": [0] * count})


# Each took seconds of the event loop, or raised RecursionError, when tools were checked as schemas.
ATTACKS: dict[str, dict[str, Any]] = {
    "classes": {"pattern": "(?i)" + "[a-\uffff]" * 1500},
    "wide classes": {"pattern": "[\u0000-\uffff]" * 3000},
    "open parentheses": {"pattern": "(" * 5000},
    "nested parentheses": {"pattern": "(" * 700 + ")" * 700},
    "pattern properties": {"patternProperties": {"(a+)+" * 1000: {}}},
    "allOf": {"allOf": [True] * 10_000},
    "empty properties": {"properties": {f"p{n}": {} for n in range(4500)}},
}
# Of drafts 4 and 7, and of none.
ODD_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]},
    {"properties": {"b": {"type": "array", "items": [{"type": "string"}]}}},
    {"properties": {"b": {"type": "number", "minimum": 0, "exclusiveMinimum": True}}},
    {"properties": {"b": {"type": "string", "required": True}}},
    {"properties": {"b": {"type": "text"}}, "definitions": {"c": 1}},
    {"required": "x"},
    {"properties": {"b": {"anyOf": {"type": "string"}}}},
    {"properties": {"b": {"type": "object", "properties": ["c"], "required": True}}},
    {"properties": {"b": {"enum": "abc", "type": ["string", {}]}}},
    {"properties": {"b": {"type": [{}]}, "c": {"$ref": 3}, "d": {"description": 4}}},
    {"$defs": {"x": True}, "properties": {"b": {"$ref": "#/$defs/x"}}},
    {"$defs": ["x"]},
    {"properties": [1]},
)


@pytest.mark.parametrize("schema", ATTACKS.values(), ids=ATTACKS)
def test_a_check_compiles_no_pattern(schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_nothing(*_: Any) -> Any:
        raise AssertionError("a pattern was compiled")

    parameters = {"type": "object", "properties": {"x": {"type": "string", **schema}}}
    tools = [_tool(parameters=parameters)]
    with monkeypatch.context() as patch:  # a failure is reported with the help of patterns
        for name in ("compile", "match", "fullmatch", "search", "sub"):
            patch.setattr(re, name, compile_nothing)
        assert validate_tools(tools) == ("f",)
        assert "type f = " in tools_text(tools)


@pytest.mark.parametrize("schema", ODD_SCHEMAS)
def test_a_schema_of_any_draft_reaches_the_model(schema: dict[str, Any]) -> None:
    tools = [_tool(parameters={"type": "object", **schema})]
    assert validate_tools(tools) == ("f",)
    text = tools_text(tools)
    if not text.startswith("# Tools"):  # it has no TypeScript form
        assert json.loads(text) == tools


def test_valid_tools_give_their_names() -> None:
    tools = [WEATHER_TOOL, _tool("a-b_C9", description=None, parameters={}), _tool("g" * 128)]
    assert validate_tools(tools) == ("get_weather", "a-b_C9", "g" * 128)
    assert validate_tools([]) == ()


@pytest.mark.parametrize(
    ("tools", "field", "reason"),
    [
        ("x", "tools", "must be a list"),
        ({}, "tools", "must be a list"),
        ([_tool(f"f{n}") for n in range(129)], "tools", "at most 128 tools are allowed, not 129"),
        ([3], "tools[0]", "must be an object"),
        ([{"function": {"name": "f"}}], "tools[0].type", "must be function"),
        ([{"type": "retrieval"}], "tools[0].type", "must be function"),
        ([{"type": "function", "function": "f"}], "tools[0].function", "must be an object"),
        ([_tool(), _tool(None)], "tools[1].function.name", "must match"),
        ([_tool("")], "tools[0].function.name", "must match"),
        ([_tool("get weather")], "tools[0].function.name", "must match"),
        ([_tool("f\n")], "tools[0].function.name", "must match"),
        ([_tool("<|im_end|>")], "tools[0].function.name", "must match"),
        ([_tool("f" * 129)], "tools[0].function.name", "must match"),
        ([_tool(), _tool()], "tools[1].function.name", "declared twice"),
        ([_tool(description=["d"])], "tools[0].function.description", "must be a string"),
        ([_tool(description="d" * 65_536)], "tools[0]", "at most 65536 are allowed"),
        ([_tool(parameters=_nested(20))], "tools[0]", "deeper than 32 levels"),
        ([_tool(parameters=_nested(100_000))], "tools[0]", "deeper than 32 levels"),
        ([_tool(parameters={"type": "object", "default": {1, 2}})], "tools[0]", "is not JSON"),
        ([_tool(parameters="object")], "tools[0].function.parameters", "must be a JSON Schema"),
        ([_tool(f"f{n}", description="d" * 65_000) for n in range(17)], "tools", "at most 1048576 bytes"),
        ([_values(f"f{n}", 17_000) for n in range(2)], "tools", "at most 32768 JSON values"),
    ],
)
def test_each_defect_is_reported_with_its_field(tools: Any, field: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason) as caught:
        validate_tools(tools)
    assert caught.value.field == field


def test_the_path_starts_with_the_callers_field() -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate_tools([_tool("")], field="functions")
    assert caught.value.field == "functions[0].function.name"


def test_a_lone_surrogate_is_counted_and_not_refused() -> None:
    assert validate_tools([_tool(description="\ud800")]) == ("f",)


def test_size_is_counted_in_bytes() -> None:
    with pytest.raises(InvalidArgument, match="at most"):
        validate_tools([_tool(description="天" * 22_000)])


def test_the_cache_of_valid_tools_compares_whole_tools() -> None:
    """Tools that were valid before are cached; tools that differ anywhere are checked."""
    good = {"type": "object", "properties": {"city": {"type": "string"}}}
    bad = {**good, "title": {1, 2}}
    for _ in range(2):
        validate_tools([_tool(parameters=good)])
        with pytest.raises(InvalidArgument):
            validate_tools([_tool(parameters=bad)])

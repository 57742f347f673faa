"""Validation of tool definitions: each error holds the path of the defect."""

from __future__ import annotations

from typing import Any

import pytest

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


def test_valid_tools_give_their_names() -> None:
    tools = [WEATHER_TOOL, _tool("a-b_C9", description=None, parameters={}), _tool("g" * 64)]
    assert validate_tools(tools) == ("get_weather", "a-b_C9", "g" * 64)
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
        ([_tool("f" * 65)], "tools[0].function.name", "must match"),
        ([_tool(), _tool()], "tools[1].function.name", "declared twice"),
        ([_tool(description=["d"])], "tools[0].function.description", "must be a string"),
        ([_tool(description="d" * 65_536)], "tools[0]", "at most 65536 are allowed"),
        ([_tool(parameters=_nested(20))], "tools[0]", "deeper than 32 levels"),
        ([_tool(parameters=_nested(100_000))], "tools[0]", "deeper than 32 levels"),
        ([_tool(parameters={"type": "object", "default": {1, 2}})], "tools[0]", "is not JSON"),
        ([_tool(parameters="object")], "tools[0].function.parameters", "must be a JSON Schema object"),
        ([_tool(parameters={"type": "string"})], "tools[0].function.parameters.type", "must be object"),
        ([_tool(parameters={"properties": {}})], "tools[0].function.parameters.type", "must be object"),
        (
            [_tool(parameters={"type": "object", "properties": {"x": {"type": "text"}}})],
            "tools[0].function.parameters.properties.x.type",
            "is not valid JSON Schema",
        ),
        (
            [_tool(parameters={"type": "object", "anyOf": [{"minimum": "1"}]})],
            "tools[0].function.parameters.anyOf[0].minimum",
            "is not valid JSON Schema",
        ),
        (
            [_tool(parameters={"type": "object", "required": "x"})],
            "tools[0].function.parameters.required",
            "is not valid JSON Schema",
        ),
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


def test_the_cache_of_valid_schemas_compares_whole_schemas() -> None:
    """A schema that was valid before is cached; one that differs anywhere is validated."""
    good = {"type": "object", "properties": {"city": {"type": "string"}}}
    bad = {"type": "object", "properties": {"city": {"type": "strnig"}}}
    for _ in range(2):
        validate_tools([_tool(parameters=good)])
        with pytest.raises(InvalidArgument):
            validate_tools([_tool(parameters=bad)])

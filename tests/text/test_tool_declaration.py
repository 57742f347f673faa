"""Golden TypeScript declarations of tools, and JSON for schemas without a TypeScript form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from libs.text.tool_declaration import tools_text
from libs.text.tool_schema import validate_tools
from tests.text.corpus import WEATHER_TOOL


def _declare(parameters: dict[str, Any] | None, description: str | None = None) -> str:
    """Return the body of the namespace for one function `f`."""
    function: dict[str, Any] = {"name": "f"}
    if parameters is not None:
        function["parameters"] = parameters
    if description is not None:
        function["description"] = description
    text = tools_text([{"type": "function", "function": function}])
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(head)
    assert text.endswith(tail)
    return text[len(head) : -len(tail)]


def test_required_parameters_come_first_and_bounds_are_comments() -> None:
    assert tools_text([WEATHER_TOOL]) == (
        "# Tools\n"
        "\n"
        "## functions\n"
        "namespace functions {\n"
        "// Weather of a city.\n"
        "type get_weather = (_: {\n"
        "  // Name of the city\n"
        "  city: string,\n"
        "  // maximum: 7, minimum: 1\n"
        "  // Default: 1\n"
        "  days?: number,\n"
        '  unit?: "celsius" | "fahrenheit"\n'
        "}) => any;\n"
        "}\n"
    )


def test_each_group_of_parameters_is_sorted_by_name() -> None:
    properties = {name: {"type": "string"} for name in "dbac"}
    declared = _declare({"type": "object", "properties": properties, "required": ["d", "c"]})
    assert [line.strip(" ,") for line in declared.splitlines()[1:-1]] == [
        "c: string",
        "d: string",
        "a?: string",
        "b?: string",
    ]


def test_several_functions_keep_their_order() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("zeta", "alpha")]
    assert "type zeta = (_: {}) => any;\ntype alpha = (_: {}) => any;\n}" in tools_text(tools)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "string"),
        ({"type": "integer"}, "number"),
        ({"type": "boolean"}, "boolean"),
        ({"type": ["string", "null"]}, "string | null"),
        ({"type": ["integer", "array", "object"]}, "number | Array<any> | {}"),
        ({"enum": ["a", 1, True, None]}, '"a" | 1 | True | None'),
        ({"type": ["string", "null"], "enum": ["a", None]}, '"a" | None'),
        (
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
            "string | Array<number>",
        ),
        ({"type": "array"}, "Array<any>"),
        ({"type": "object"}, "{}"),
        ({"type": "object", "additionalProperties": False}, "{\n    [k: string]: never\n  }"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "{\n    [k: string]: number\n  }"),
        ({"type": "object", "properties": {"b": {"type": "string"}}}, "{\n    b?: string\n  }"),
        (
            {"type": "array", "items": {"type": "string", "description": "A name", "maxLength": 5}},
            "Array<\n    // A name\n    // maxLength: 5\n    string\n  >",
        ),
        ({}, "any"),
        (True, "any"),
        (False, "null"),
    ],
)
def test_types_are_declared_in_typescript(schema: Any, expected: str) -> None:
    declared = _declare({"type": "object", "properties": {"x": schema}, "required": ["x"]})
    assert declared == f"type f = (_: {{\n  x: {expected}\n}}) => any;"


def test_comments_keep_line_breaks_and_array_bounds() -> None:
    properties = {
        "x": {"type": "array", "description": "One\n\ntwo", "minItems": 1, "maxItems": 2, "default": ["é"]}
    }
    assert _declare({"type": "object", "properties": properties}, "Does\nit.") == (
        "// Does\n// it.\ntype f = (_: {\n  // One\n\n  // two\n  // maxItems: 2, minItems: 1\n"
        '  // Default: ["é"]\n  x?: Array<any>\n}) => any;'
    )


def test_definitions_become_interfaces() -> None:
    point = {"type": "object", "description": "A place", "properties": {"lat": {"type": "number"}}}
    declared = _declare(
        {"type": "object", "properties": {"at": {"$ref": "#/$defs/Point"}}, "$defs": {"Point": point}}
    )
    assert declared == (
        "// A place\ninterface Point {\n  lat?: number\n}\ntype f = (_: {\n  at?: Point\n}) => any;"
    )


def test_recursive_parameters_become_an_interface() -> None:
    declared = _declare({"type": "object", "properties": {"next": {"$ref": "#"}, "v": {"type": "string"}}})
    assert declared == (
        "interface parameters {\n  next?: parameters,\n  v?: string\n}\ntype f = (_: parameters) => any;"
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"description": "no type"},
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/Missing"},
        {"type": "integer", "enum": ["a"]},
        {"type": ["string", "integer", "null"], "enum": ["a"]},
        {"type": ["string", "unknown"]},
    ],
)
def test_schemas_without_typescript_form_are_declared_as_compact_sorted_json(schema: dict[str, Any]) -> None:
    parameters = {"type": "object", "properties": {"é": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = tools_text(tools)
    assert json.loads(text) == tools
    assert text.startswith('[{"function":{"name":"f","parameters":{"properties":{"é":{')


def test_the_order_of_keys_does_not_matter() -> None:
    function = WEATHER_TOOL["function"]
    assert isinstance(function, dict)
    turned = {"function": dict(reversed(function.items())), "type": "function"}
    assert tools_text([turned]) == tools_text([WEATHER_TOOL])


@pytest.mark.parametrize("schema", [True, False])
def test_parameters_that_are_true_or_false_are_declared_as_json(schema: bool) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    assert validate_tools(tools) == ("f",)
    declared = tools_text(tools)
    assert declared.startswith('[{"function":{"name":"f","parameters":') and json.loads(declared) == tools

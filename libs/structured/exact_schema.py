"""A schema as llguidance has to see it, so that it holds formats and numbers exactly. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from libs.structured.number_bounds import with_exact_bounds
from libs.structured.string_formats import with_pattern

# Keywords whose values are data and no schemas, and those whose values are schemas by name.
_DATA = frozenset({"const", "default", "enum", "examples"})
_BY_NAME = frozenset({"$defs", "definitions", "patternProperties", "properties"})


def exact_schema(schema: Any) -> Any:
    """A copy of the schema, or of a list of schemas, with what llguidance would leave open."""
    if isinstance(schema, list):
        return [exact_schema(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _exact_value(key, item) for key, item in schema.items()}
    return with_exact_bounds(with_pattern(made))


def _exact_value(keyword: str, value: Any) -> Any:
    if keyword in _DATA:
        return value
    if keyword in _BY_NAME and isinstance(value, Mapping):
        return {name: exact_schema(item) for name, item in value.items()}
    return exact_schema(value)

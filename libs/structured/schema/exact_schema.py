"""A schema as llguidance has to see it, so that it holds formats, numbers and places exactly. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from libs.structured.schema.array_places import has_items_as_places, with_one_form
from libs.structured.schema.number_bounds import with_exact_bounds
from libs.structured.schema.open_keys import with_spelled_keys
from libs.structured.schema.string_formats import with_pattern

# Keywords whose values are data and no schemas, and those whose values are schemas by name.
_DATA = frozenset({"const", "default", "enum", "examples"})
_BY_NAME = frozenset({"$defs", "definitions", "patternProperties", "properties"})
# Values with which keywords that no grammar holds say nothing.
_WITHOUT_EFFECT: Mapping[str, Sequence[Any]] = {
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
_Part = dict[str, Any]


def has_no_effect(keyword: str, value: Any) -> bool:
    """Whether the keyword allows everything with this value. llguidance refuses it with any."""
    harmless = _WITHOUT_EFFECT.get(keyword, ())
    return any(value is each or (value == {} and each == {}) for each in harmless)


def exact_schema(schema: Any, *, spells_keys: bool) -> Any:
    """A copy of the schema with what llguidance would leave open, and with `spells_keys` those keys."""
    is_old = has_items_as_places(schema)

    def exact(part: _Part) -> _Part:
        said = {name: value for name, value in part.items() if not has_no_effect(name, value)}
        made = with_one_form(with_exact_bounds(with_pattern(said)), is_old=is_old)
        return with_spelled_keys(made) if spells_keys else made

    return _copy(schema, exact)


def _copy(schema: Any, exact: Callable[[_Part], _Part]) -> Any:
    if isinstance(schema, list):
        return [_copy(item, exact) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    return exact({key: _copy_value(key, item, exact) for key, item in schema.items()})


def _copy_value(keyword: str, value: Any, exact: Callable[[_Part], _Part]) -> Any:
    if keyword in _DATA:
        return value
    if keyword in _BY_NAME and isinstance(value, Mapping):
        return {name: _copy(item, exact) for name, item in value.items()}
    return _copy(value, exact)

"""What llguidance takes and does not hold: a schema with such a part is refused by its path. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from libs.structured.endless_schemas import find_endless
from libs.structured.json_schema import Json, forbids_unicode_escapes, walk

# Integers up to here are exact as doubles.
_MAX_EXACT = 2**53
# Control characters that JSON spells by \u alone.
_SPELLED_BY_CODE = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f]")
_Found = tuple[str, str] | None


def find_unheld(schema: Json | bool) -> _Found:
    """The path of the first such part, and why it is refused; None without one."""
    parts = list(walk(schema))
    for path, part in parts:
        for name, reason in (_old_keyword(part), _places(part), _large(part), _repeatable(part)):
            if name:
                return _joined(path, name), reason
    if forbids_unicode_escapes(schema):
        for path, part in parts:
            if name := _with_control_character(part):
                return _joined(path, name), "has a control character, and the schema has undeclared keys"
    endless = find_endless(schema)
    return None if endless is None else (endless, "has no value that ends")


_NOTHING = ("", "")


def _old_keyword(part: Json) -> tuple[str, str]:
    """Keywords of draft 3. A value that they cannot have is an annotation."""
    values: Mapping[str, type | tuple[type, ...]] = {
        "disallow": (str, list),
        "divisibleBy": (int, float),
        "extends": (dict, list),
    }
    found = next((name for name, kinds in values.items() if isinstance(part.get(name), kinds)), "")
    return found, "is not supported"


def _places(part: Json) -> tuple[str, str]:
    """Drafts disagree which of these keywords hold the items."""
    if "prefixItems" not in part:
        return _NOTHING
    found = "items" if isinstance(part.get("items"), list) else "additionalItems"
    return (found, "is not supported beside prefixItems") if found in part else _NOTHING


def _large(part: Json) -> tuple[str, str]:
    """llguidance computes with doubles."""
    for name in ("const", "enum"):
        for value in _values(part.get(name)):
            if type(value) in (int, float) and abs(value) > _MAX_EXACT:
                return name, "has a number beyond 2^53"
    return _NOTHING


def _repeatable(part: Json) -> tuple[str, str]:
    """A repeated undeclared key could satisfy the keyword, and a reader would count it once."""
    least = part.get("minProperties", 0)
    required = part.get("required")
    named = set(map(str, required)) if isinstance(required, list) else set()
    is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    if isinstance(least, (int, float)) and least > len(named) + 1 and not is_closed:
        return "minProperties", "is not supported where keys are not declared: one may occur twice"
    return _NOTHING


def _with_control_character(part: Json) -> str:
    for name in ("const", "enum"):
        if any(
            isinstance(value, str) and _SPELLED_BY_CODE.search(value) for value in _values(part.get(name))
        ):
            return name
    return ""


def _values(value: Any) -> Iterator[Any]:
    """All strings and numbers within a JSON value, keys too."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, Mapping):
            left.extend(item)
            left.extend(item.values())
        elif isinstance(item, list):
            left.extend(item)
        else:
            yield item


def locate(schema: Json | bool, error: str, compile_alone: Callable[[Json], str]) -> str:
    """The path of the keyword that an error of llguidance is about; empty for the whole schema.

    `compile_alone` answers the error of a part, which is empty for a good one.
    """
    keyword = next((name for word, name in _ERRORS if word in error), None)
    if keyword is None or not isinstance(schema, Mapping):
        return ""
    named = [(path, part) for path, part in walk(schema) if keyword in part]
    if keyword == "minProperties":
        named += [(path, part) for path, part in walk(schema) if "maxProperties" in part]
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    for path, part in reversed(named[:_MAX_TRIED]):
        if error in compile_alone({**definitions, **part}):
            return _joined(path, keyword if keyword in part else "maxProperties")
    return ""


# A word of llguidance's errors, and the keyword that it is about.
_ERRORS = (
    ("oneOf constraints", "oneOf"),
    ("min/maxProperties", "minProperties"),
    ("patternProperty", "patternProperties"),
    ("multipleOf", "multipleOf"),
    ("regex parse", "pattern"),
    ("minimum", "minimum"),
    ("minLength", "minLength"),
    ("minItems", "minItems"),
)
_MAX_TRIED = 32


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

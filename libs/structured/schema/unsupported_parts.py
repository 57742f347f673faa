"""Parts of schemas that llguidance takes and does not enforce: they are refused by their path. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from libs.structured.forced_text import FORCED_REASON, forces_much
from libs.structured.schema.distinct_keys import count_distinct_keys, find_few_keys, find_most_keys
from libs.structured.schema.endless_schemas import without_endless
from libs.structured.schema.large_unions import find_large_union
from libs.structured.schema.open_keys import can_spell_keys, find_control_character, values
from libs.structured.schema.schema_walk import Json, Parts, path_text, walk

# Integers up to here are exact as doubles.
_MAX_EXACT = 2**53
_Found = tuple[str, str] | None
_NOTHING = ("", "")
_UNSPELLED = "has a control character, and the schema has keys beside patterns or names beyond 100 characters"


def find_unsupported_part(schema: Json | bool) -> _Found:
    """The path of the first such part, and why it is refused; None without one."""
    parts = list(walk(schema))
    for path, part in parts:
        for name, reason in (_old_keyword(part), _large(part), _long_text(part)):
            if name:
                return path_text(path, name), reason
    pruned = without_endless(schema, parts)
    if pruned is False and schema is not False:
        return "", "has no value that ends"
    if (union := find_large_union(schema, parts)) is not None:
        return union
    return _find_keys(parts if pruned is schema else list(walk(pruned)))


def _find_keys(parts: Parts) -> _Found:
    """Parts whose keys the grammar cannot spell, or compare."""
    n_distinct = count_distinct_keys(parts)
    if (character := find_control_character(parts)) is not None:
        if n_distinct:
            return character, "has a control character, and minProperties distinguishes undeclared keys"
        if not can_spell_keys(parts):
            return character, _UNSPELLED
    if (few := find_few_keys(parts, n_distinct)) is not None:
        return few, f"is not supported beside minProperties: fewer than {n_distinct} keys fit"
    if (most := find_most_keys(parts, n_distinct)) is not None:
        return most, "is not supported beside minProperties of keys that patterns alone allow"
    return None


def _old_keyword(part: Json) -> tuple[str, str]:
    """Keywords of draft 3. A value that they cannot have is an annotation."""
    kinds_of: Mapping[str, type | tuple[type, ...]] = {
        "disallow": (str, list),
        "divisibleBy": (int, float),
        "extends": (dict, list),
    }
    found = next((name for name, kinds in kinds_of.items() if isinstance(part.get(name), kinds)), "")
    return found, "is not supported"


def _large(part: Json) -> tuple[str, str]:
    """llguidance computes with doubles."""
    for name in ("const", "enum"):
        for value in values(part.get(name)):
            if type(value) in (int, float) and abs(value) > _MAX_EXACT:
                return name, "has a number beyond 2^53"
    return _NOTHING


def _long_text(part: Json) -> tuple[str, str]:
    pattern, patterns = part.get("pattern"), part.get("patternProperties")
    if isinstance(pattern, str) and forces_much(pattern):
        return "pattern", FORCED_REASON
    if isinstance(patterns, Mapping) and any(map(forces_much, patterns)):
        return "patternProperties", FORCED_REASON
    return _NOTHING


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
            return path_text(path, keyword if keyword in part else "maxProperties")
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
